"""A head split over the vocabulary of 2 and 4 gloo ranks equals the whole head."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import shard_worker
import torch

from headway_kernels.errors import BackendUnavailable, ShapeError
from headway_kernels.head import VocabShard, head_logp


def run_ranks(world: int, folder: Path) -> list[dict[str, Any]]:
    """Starts the ranks, waits for all of them, and returns what each wrote."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    paths = [folder / f"{rank}.pt" for rank in range(world)]
    ranks = [
        subprocess.Popen(
            [sys.executable, shard_worker.__file__, str(rank), str(world), str(port), str(path)],
            env=environment, stderr=subprocess.PIPE, text=True,
        )
        for rank, path in enumerate(paths)
    ]  # fmt: skip
    try:
        errors = [rank.communicate(timeout=90)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(errors)
    return [torch.load(path, weights_only=True) for path in paths]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_agree_bit_for_bit_and_equal_the_whole_head(world: int, tmp_path: Path) -> None:
    ranks = run_ranks(world, tmp_path)
    whole = shard_worker.steps(None, 0, shard_worker.V)
    for index, want in enumerate(whole):
        parts = [rank["steps"][index] for rank in ranks]
        for name in ("loss", "x_grad", "logp", "entropy", "sums"):
            assert all(torch.equal(part[name], parts[0][name]) for part in parts), name
        got = parts[0]
        rounding = 2**-7 if got["x_grad"].dtype is torch.bfloat16 else 1e-5
        scale = float(want["x_grad"].abs().max())
        assert float((got["x_grad"].double() - want["x_grad"].double()).abs().max()) <= rounding * max(
            scale, 1e-9
        )
        for name in ("weight_grad", "bias_grad"):
            joined = torch.cat([part[name] for part in parts])
            assert float((joined - want[name]).abs().max()) <= 1e-5 * max(float(want[name].abs().max()), 1e-9)
        for name in ("loss", "logp", "entropy", "sums"):
            torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-5)
        for mine, theirs in zip(got["scores"], want["scores"], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert all("exactly one rank" in rank["refused"] for rank in ranks)


def test_a_shard_must_be_a_part_and_needs_a_process_group() -> None:
    data = shard_worker.problem(torch.float32, far=False)
    arguments = (data["x"], data["weight"], data["target"])
    ones = torch.ones(shard_worker.T)
    with pytest.raises(ShapeError, match="not a part"):
        head_logp(*arguments, inv_temperature=ones, shard=VocabShard(1, shard_worker.V))
    with pytest.raises(BackendUnavailable, match="init_process_group"):
        head_logp(*arguments, inv_temperature=ones, shard=VocabShard(0, shard_worker.V))
