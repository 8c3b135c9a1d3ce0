"""One rank of a vocabulary-parallel head: `shard_worker.py RANK WORLD PORT OUT`; writes its results to OUT."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from headway_kernels.errors import ShapeError
from headway_kernels.head import VocabShard, head_logp, head_loss_step
from headway_kernels.objective import Objective

T, V, H = 13, 31, 6
OBJECTIVES = (
    Objective("grpo", entropy_coef=0.05, kl="k3", kl_coef=0.1),
    Objective("gspo", clip_low=0.05, clip_high=0.05),
)


def problem(dtype: torch.dtype, far: bool) -> dict[str, Any]:
    """The same inputs on every rank; `far`: some rows' largest logit is 800 above what other ranks hold."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    x, weight, bias = normal(T, H), normal(V, H), normal(V)
    if far:
        bias[3] = 800.0
    logp = torch.log_softmax(torch.tanh((x @ weight.T + bias) / 900) * 900, 1)
    target = torch.randint(0, V, (T,), generator=generator)
    target[0], target[1], target[2] = 0, V - 1, 3
    if far:
        target[:] = 3
    return {
        "x": x, "weight": weight, "bias": bias, "target": target,
        "rows": {
            "behaviour": logp.gather(1, target[:, None])[:, 0] + 0.3 * normal(T), "advantage": normal(T),
            "reference": normal(T) - 3, "token_weight": torch.rand(T, generator=generator) * (torch.arange(T) % 4 > 0),
            "segments": torch.tensor([0, 5, 5, T]),
        },
    }  # fmt: skip


def steps(shard: VocabShard | None, low: int, high: int) -> list[dict[str, Any]]:
    """Both objectives in fp32, bf16 and with far logits, on the columns [low, high) of the head."""
    out = []
    for dtype, far, objective in (
        (torch.float32, False, OBJECTIVES[0]), (torch.float32, False, OBJECTIVES[1]),
        (torch.bfloat16, False, OBJECTIVES[0]), (torch.float32, True, OBJECTIVES[0]),
    ):  # fmt: skip
        data = problem(dtype, far)
        weight, bias = data["weight"][low:high].clone(), data["bias"][low:high].clone()
        grad, bias_grad = torch.zeros(high - low, H), torch.zeros(high - low)
        head: dict[str, Any] = {
            "inv_temperature": torch.linspace(0.5, 1.5, T), "bias": bias, "shard": shard,
            "chunk_bytes": 400, "softcap": 900.0 if far else None,
        }  # fmt: skip
        result = head_loss_step(
            data["x"], weight, data["target"], objective=objective, weight_grad=grad, bias_grad=bias_grad,
            **data["rows"], **head,
        )  # fmt: skip
        scores = head_logp(data["x"], weight, data["target"], **head)
        out.append(
            {
                "loss": result.loss, "x_grad": result.x_grad, "weight_grad": grad, "bias_grad": bias_grad,
                "logp": result.logp, "entropy": result.entropy, "sums": result.stats.sums, "scores": tuple(scores),
            }
        )  # fmt: skip
    return out


def main(rank: int, world: int, port: int, path: str) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    cuts = [0, 4, 11, 30, V] if world == 4 else [0, 17, V]  # no two parts of one size
    results: dict[str, Any] = {"steps": steps(VocabShard(cuts[rank], V), cuts[rank], cuts[rank + 1])}
    data = problem(torch.float32, False)
    try:  # every rank claims the same columns: some targets are on no rank, or on all
        wrong = VocabShard(0, V)
        head_logp(data["x"], data["weight"][:3], data["target"], inv_temperature=torch.ones(T), shard=wrong)
        results["refused"] = ""
    except ShapeError as error:
        results["refused"] = str(error)
    torch.save(results, path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
