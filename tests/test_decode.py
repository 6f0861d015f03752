"""Speculative decoding writes what the target alone would have written."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from draftsmith.config import DFlashOptions
from draftsmith.decode import Decoded, Sampling, _verify, decode_plain, decode_speculative
from draftsmith.drafters import DFlashDrafter, build_config
from draftsmith.targets import HFTarget
from tests.tiny import tiny_target, tiny_tokenizer

BLOCK = 5
MASK = 300
GREEDY = Sampling()
LENGTH = 31
PROMPT = torch.tensor([1, *b"a prompt of some thirty tokens"])


def make_target(kind: str = "llama", **options) -> HFTarget:
    return HFTarget(tiny_target(kind, **options), tiny_tokenizer(), (0, 2))


def make_drafter(target: HFTarget, **options) -> DFlashDrafter:
    """A random drafter."""
    torch.manual_seed(1)
    chosen = DFlashOptions(**{"num_layers": 2, "block_size": BLOCK, "mask_token_id": MASK, **options})
    drafter = DFlashDrafter(build_config(chosen, target.config, target.layer_ids)).eval()
    with torch.no_grad():
        for weight in drafter.parameters():
            if weight.ndim > 1:
                weight.mul_(8)  # far from 0, so that what the drafter sees decides what it proposes
    return drafter


class Oracle(DFlashDrafter):
    """Proposes the known answer, each token raised by `shift`, and checks the context it is given."""

    def __init__(self, target: HFTarget, answer: list[int], *, shift: int = 0) -> None:
        super().__init__(make_drafter(target).config)
        self.added: list[int] = []
        self._target, self._answer, self._shift = target, answer, shift

    def project(self, context, position):
        self.added.append(len(position))
        return [(position[:, None, None].float(), position[:, None, None].float())]

    def propose(self, context, embedded):
        positions = context[0][0].flatten().tolist()
        assert positions == list(range(len(positions)))  # all committed tokens but the last, once, in order
        first = len(positions) - len(PROMPT)
        wanted = [self._answer[i] if i < len(self._answer) else 7 for i in range(first, first + len(embedded))]
        wanted = [(token + self._shift) % 259 for token in wanted]
        rows = self._target.head[wanted]
        assert (rows @ self._target.head.T).argmax(-1).tolist() == wanted  # a row is its own best match
        return rows[1:]


def plain(target: HFTarget, prompt: torch.Tensor, limit: int) -> list[int]:
    return decode_plain(target, prompt, limit, GREEDY, torch.Generator())


def speculative(target: HFTarget, drafter, prompt: torch.Tensor, limit: int) -> Decoded:
    return decode_speculative(target, drafter, prompt, limit, GREEDY, torch.Generator())


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def target(request) -> HFTarget:
    """A target that never stops by itself."""
    target = make_target(request.param, seed=4)
    target.eos_ids = frozenset()
    return target


@pytest.fixture(scope="module")
def answer(target) -> list[int]:
    """What it writes to PROMPT."""
    return plain(target, PROMPT, LENGTH)


def test_plain_equals_generate(target, answer):
    tokens = target.model.generate(PROMPT[None], max_new_tokens=LENGTH, do_sample=False, eos_token_id=MASK)
    assert answer == tokens[0, len(PROMPT) :].tolist()
    assert len(set(answer)) > 10, "a target that repeats itself would prove little"


@pytest.mark.parametrize("length", [1, 2, BLOCK, 31])
def test_random_drafter(target, length):
    prompt = PROMPT[:length]
    decoded = speculative(target, make_drafter(target), prompt, LENGTH)
    assert decoded.tokens == plain(target, prompt, LENGTH)


@pytest.mark.parametrize(
    "options",
    [
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4},
        {"layer_types": ("sliding_attention", "sliding_attention"), "sliding_window": 8},
        {"is_causal": True},
    ],
)
def test_drafter_variants_beyond_their_window(target, answer, options):
    assert speculative(target, make_drafter(target, **options), PROMPT, LENGTH).tokens == answer


def test_adversarial_drafter_costs_one_cycle_a_token(target, answer):
    decoded = speculative(target, Oracle(target, answer, shift=1), PROMPT, LENGTH)
    assert decoded.tokens == answer
    assert decoded.accept_length == 1.0
    assert not any(decoded.drafted)


def test_perfect_drafter_fills_every_block(target, answer):
    decoded = speculative(target, Oracle(target, answer), PROMPT, LENGTH)
    assert decoded.tokens == answer
    assert decoded.cycles == [BLOCK] * ((LENGTH - 1) // BLOCK)
    assert decoded.drafted == [False] + ([True] * (BLOCK - 1) + [False]) * len(decoded.cycles)


def test_the_drafter_cache_grows_by_committed_tokens_only(target, answer):
    answer = answer[:7] + [t + 1 for t in answer[7:9]] + answer[9:]  # right at first, then wrong twice, then right
    drafter = Oracle(target, answer)
    decoded = speculative(target, drafter, PROMPT, LENGTH)
    assert len(set(decoded.cycles)) > 1
    assert drafter.added == [len(PROMPT), *decoded.cycles[:-1]]


@pytest.mark.parametrize("limit", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
@pytest.mark.parametrize("shift", [0, 1])
def test_max_new_tokens_in_mid_block(target, answer, limit, shift):
    decoded = speculative(target, Oracle(target, answer, shift=shift), PROMPT, limit)
    assert decoded.tokens == answer[:limit]
    assert len(decoded.drafted) == limit == 1 + sum(decoded.cycles)


@pytest.mark.parametrize("number", range(1, 2 * BLOCK + 2))
@pytest.mark.parametrize("shift", [0, 1])
def test_stop_token_in_mid_block(number, shift):
    target = make_target()
    answer = plain(target, PROMPT, LENGTH)
    target.eos_ids = frozenset([answer[number]])
    end = answer.index(answer[number]) + 1
    decoded = speculative(target, Oracle(target, answer, shift=shift), PROMPT, LENGTH)
    assert decoded.tokens == answer[:end] == plain(target, PROMPT, LENGTH)
    assert len(decoded.drafted) == end == 1 + sum(decoded.cycles)
    assert decoded.accepted == (decoded.offered if shift == 0 else [0] * len(decoded.cycles))


def test_stop_token_from_prefill_needs_no_cycle():
    target = make_target()
    target.eos_ids = frozenset(plain(target, PROMPT, 1))
    decoded = speculative(target, make_drafter(target), PROMPT, LENGTH)
    assert len(decoded.tokens) == 1 and decoded.cycles == []
    assert decoded.accept_length is None


# Sampling: the distribution is the target's own.

SAMPLINGS = [
    Sampling(temperature=0.8),
    Sampling(temperature=0.8, top_k=3),
    Sampling(temperature=0.8, top_p=0.7),
    Sampling(temperature=1.5, top_k=6, top_p=0.8),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_rejection_sampling_is_exact(sampling):
    """Over drafts and coin tosses, the first token a cycle commits is distributed as the target's p."""
    torch.manual_seed(3)
    p, q = sampling.probabilities(torch.randn(2, 16)), sampling.probabilities(torch.randn(1, 16))
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(16)
    for draft in sampling.draw(q.expand(5_000, -1), generator).tolist():
        accepted, bonus = _verify(p, torch.tensor([draft]), q, sampling, generator)
        counts[draft if accepted else bonus] += 1
    assert_distribution(counts, p[0])


@pytest.mark.parametrize("sampling", SAMPLINGS[1:3])
def test_sampled_texts_are_distributed_as_plain_ones(sampling):
    """All texts of three tokens by exact enumeration, against speculative draws."""
    target = HFTarget(tiny_target(vocab=16), tiny_tokenizer(), (0, 2))
    drafter = make_drafter(target, mask_token_id=15)
    prompt = torch.tensor([1, 5, 7])
    expected = enumerate_texts(target, prompt, 3, sampling)
    assert abs(sum(expected.values()) - 1) < 1e-4
    generator = torch.Generator().manual_seed(0)
    num = 500
    drawn = Counter(
        tuple(decode_speculative(target, drafter, prompt, 3, sampling, generator).tokens) for _ in range(num)
    )
    assert set(drawn) <= set(expected)
    likely = [text for text, chance in expected.items() if chance * num >= 5]
    assert len(likely) > 5
    counts = torch.tensor([drawn[text] for text in likely]).float()
    chances = torch.tensor([expected[text] for text in likely])
    rest = float(1 - chances.sum())
    if rest * num >= 5:  # all unlikely texts together are one more class
        counts, chances = (
            torch.cat([counts, num - counts.sum()[None]]),
            torch.cat([chances, chances.new_tensor([rest])]),
        )
    assert_distribution(counts, chances / chances.sum())


def enumerate_texts(target: HFTarget, prompt: torch.Tensor, length: int, sampling: Sampling) -> dict[tuple, float]:
    """Every text that plain decoding can write, and its probability."""
    texts: dict[tuple, float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple, float] = {}
        for text, chance in texts.items():
            if text and text[-1] in target.eos_ids:
                longer[text] = chance
                continue
            logits, _ = target.extend(torch.cat([prompt, prompt.new_tensor(text)]), target.new_cache())
            for token, p in enumerate(sampling.probabilities(logits[-1:])[0].tolist()):
                if p > 0:
                    longer[(*text, token)] = chance * p
        texts = longer
    return texts


def assert_distribution(counts: torch.Tensor, chances: torch.Tensor) -> None:
    """Chi-square at a fixed seed: the statistic of a true sample stays below its mean plus four deviations."""
    assert counts[chances == 0].sum() == 0
    support = chances > 0
    expected = chances[support] * counts.sum()
    freedom = int(support.sum()) - 1
    statistic = float(((counts[support] - expected) ** 2 / expected).sum())
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5, (statistic, freedom)


def test_top_k_and_top_p_keep_the_most_likely_tokens():
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.3, 0.2]]))
    assert Sampling(temperature=1.0, top_k=2).probabilities(logits)[0].nonzero().flatten().tolist() == [1, 2]
    assert Sampling(temperature=1.0, top_p=0.6).probabilities(logits)[0].nonzero().flatten().tolist() == [1, 2]
    assert Sampling(temperature=1.0, top_p=0.01).probabilities(logits)[0].nonzero().flatten().tolist() == [1]
