"""Answers on a GPU: the tokens of a CPU, with CUDA graphs and without, alone and with a drafter."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from draftsmith.data.slots import attending_by_slots
from draftsmith.data.writer import Writer
from tests.data.test_writer import STOP, answers
from tests.handmade import tiny_drafter
from tests.tiny import tiny_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]


def write(device: str, graphs: bool, drafter=None) -> tuple[list[list[int]], Writer]:
    asked, model = answers(30), tiny_target("qwen3").to(device)
    writer = Writer(model, STOP, 4, drafter.to(device) if drafter else None, graphs=graphs)
    with attending_by_slots(model):
        list(writer.write(deque(asked)))
    return [answer.tokens for answer in asked], writer


@pytest.mark.parametrize("drafted", [False, True])
def test_graphs_give_the_same_tokens(drafted):
    def drafter():
        return tiny_drafter() if drafted else None

    expected, _ = write("cpu", False)
    assert write("cuda", False, drafter())[0] == expected
    found, writer = write("cuda", True, drafter())
    assert found == expected
    assert len(writer.target.replayed._graphs) in (1, 2)
