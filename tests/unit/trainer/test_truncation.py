"""Training on tokens of a truncating sampler: policies are compared over the tokens that it kept."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rl_async.agent_loop.episode import RowTokens
from rl_async.configs.load import load_config
from rl_async.errors import DataError, ProtocolError
from rl_async.messages import Sampling, Trajectory, Version, VersionRun
from rl_async.recording import read_trajectories, write_trajectories
from rl_async.rollout_server.api import GenerateResult
from rl_async.rollout_server.embedded.sampler import Sampler
from rl_async.trainer.actor_critic import build_models
from rl_async.trainer.algorithms.algorithm import build
from rl_async.trainer.batches import Batch, plan_batch
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.packing import collate
from rl_async.trainer.update import update

pytestmark = pytest.mark.usefixtures("one_rank")

VOCAB, PROMPT, ANSWER = 40, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], 6
CUT = Sampling(0.7, 0.9, 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=64, initializer_range=0.5, **sizes))
    model.save_pretrained(where := tmp_path_factory.mktemp("model"))
    return where


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[Trajectory]:
    """Eight answers of the embedded engine's sampler to one prompt, two of them equal."""
    model, draw = LlamaForCausalLM.from_pretrained(folder).eval(), torch.Generator().manual_seed(1)
    found = []
    for sample in range(8):
        tokens, sampler = RowTokens(PROMPT), Sampler([CUT], [draw], torch.device("cpu"))
        for _ in range(ANSWER):
            with torch.no_grad():
                distribution = sampler.distribution(model(torch.tensor([tokens.token_ids])).logits[:, -1])
            (token,), (logprob,) = sampler.draw(distribution)
            kept = distribution[0].isfinite().nonzero()[:, 0].tolist()
            result = GenerateResult(
                token_ids=[int(token)],
                logprobs=[float(logprob)],
                versions=[VersionRun(Version(), 0, 1)],
                finish_reason="length",
                alternatives=[[(one, float(distribution[0, one])) for one in kept]],
            )
            tokens.add_sampled(result)
        found.append(trajectory(tokens, sample))
    found.append(trajectory(tokens, 8))
    # An engine of another version has kept one token more of the second sampled one.
    assert found[8].kept_tokens is not None and found[7].kept_tokens is not None
    kept = np.pad(found[8].kept_tokens, ((0, 0), (0, 1)), constant_values=-1)
    others = [token for token in range(VOCAB) if token not in kept[1]]
    kept[1] = np.sort(np.append(kept[1][kept[1] >= 0], others[: int((kept[1] < 0).sum())]))
    found[8].kept_tokens = kept
    return found


def trajectory(tokens: RowTokens, sample: int) -> Trajectory:
    return Trajectory(
        task_id="t",
        group_id=0,
        sample=sample,
        attempt=0,
        episode_id=f"0.{sample}",
        **tokens.arrays(),
        sampling=CUT,
        reward=float(sample % 2),
    )


def oracle(model: LlamaForCausalLM, row: Trajectory) -> Tensor:
    """log pi [S] of the sampled tokens over the kept ones, with the gradient that autograd gives."""
    logits = model(torch.from_numpy(row.token_ids).long()[None]).logits[0, len(PROMPT) - 1 : -1] / CUT.temperature
    assert row.kept_tokens is not None
    logprobs = []
    for z, token, kept in zip(logits, row.token_ids[len(PROMPT) :], row.kept_tokens, strict=True):
        places = torch.from_numpy(kept[kept >= 0]).long()
        logprobs.append((z[token] - z[places].logsumexp(0))[None])
    return torch.cat(logprobs)


@pytest.mark.parametrize("shares", [False, True])
def test_values_and_gradients_are_those_of_the_renormalised_distribution(
    folder: Path, rows: Sequence[Trajectory], shares: bool
) -> None:
    exact = LlamaForCausalLM.from_pretrained(folder).double()
    backend, batch = (
        Fsdp2Backend(str(folder), "float32", "cpu", None),
        collate(rows, device="cpu", share_prefixes=shares),
    )
    backend.model.requires_grad_(True)
    outputs = backend.model.outputs(batch, frozenset())
    assert outputs.logprobs is not None and (batch.tree is not None) == shares
    expected = torch.stack([oracle(exact, row) for row in rows])
    weights = torch.linspace(-1, 2, expected.numel(), dtype=torch.float64).view_as(expected)
    got = outputs.logprobs[:, len(PROMPT) - 1 :]
    # float32 rounds logits of up to 20 or so, through sums of 32 terms.
    assert (got - expected).abs().max() < 2e-5
    (weights * got).sum().backward()
    (weights * expected).sum().backward()
    named = dict(exact.named_parameters())
    for name, parameter in backend.model.lm.named_parameters():
        gradient, wanted = parameter.grad.full_tensor(), named[name].grad
        assert (gradient - wanted).abs().max() <= 1e-5 * wanted.abs().max(), name
    # Two rows of the same tokens, the second chosen from one token more in one place.
    assert (got[7] != got[8]).tolist() == [place == 1 for place in range(ANSWER)]


def test_the_engines_numbers_are_the_trainers(folder: Path, rows: Sequence[Trajectory]) -> None:
    backend = Fsdp2Backend(str(folder), "float32", "cpu", None)
    batch = collate(rows[:8], device="cpu", share_prefixes=True)
    first, second = (backend.forward(batch).logprobs for _ in range(2))
    assert first is not None and second is not None
    assert torch.equal((first - second).exp(), torch.ones_like(first))
    behaviour = torch.from_numpy(np.stack([row.logprobs[len(PROMPT) :] for row in rows[:8]]))
    assert (first[:, len(PROMPT) - 1 :] - behaviour).abs().max() < 2e-5
    whole = collate([untruncated(row) for row in rows[:8]], device="cpu")
    biased = backend.forward(whole).logprobs
    assert biased is not None and (biased[:, len(PROMPT) - 1 :] - behaviour).abs().max() > 0.05


def untruncated(row: Trajectory) -> Trajectory:
    return Trajectory(
        **{name: getattr(row, name) for name in row.__struct_fields__ if name not in ("sampling", "kept_tokens")},
        sampling=Sampling(CUT.temperature),
    )


def test_a_step_at_equal_weights_has_ratios_of_1(folder: Path, rows: Sequence[Trajectory], tmp_path: Path) -> None:
    """The rows come from the file of a recorded run, which keeps what they were chosen from."""
    write_trajectories(tmp_path / "x.jsonl.gz", rows[:8])
    recorded = read_trajectories(tmp_path / "x.jsonl.gz")
    overrides = [f"model.path={folder}", "model.dtype=float32", "rollout.truncation={top_k: 5, top_p: 0.9}"]
    config = load_config("calculator", [*overrides, "algorithm.kl={coef: 0.1}", "trainer.minibatches=1"])
    models, headers = build_models(config, "cpu"), [row.header() for row in recorded]
    plan = plan_batch(headers, 0, config, 1, models.row_cost)
    metrics = update(models, Batch(0, headers, plan, {row.key: row for row in recorded}), build(config), config, 0.1)
    assert metrics.metrics["correction/k3"] < 1e-9 and metrics.metrics["loss/clip_fraction"] == 0
    assert metrics.metrics["loss/kl_reference"] == 0
    assert metrics.metrics["loss/grad_norm"] > 0


def test_rows_that_do_not_name_the_kept_tokens_are_refused(rows: Sequence[Trajectory]) -> None:
    nameless = untruncated(rows[0])
    nameless.sampling = CUT
    with pytest.raises(DataError, match=r"rollout\.truncation"):
        collate([nameless], device="cpu")
    strange = untruncated(rows[0])
    strange.kept_tokens = np.full((ANSWER, 2), -1, np.int32)
    with pytest.raises(ProtocolError, match="kept_tokens"):
        strange.header()
