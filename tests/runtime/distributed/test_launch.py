"""Where there are GPUs, every process has one of its own: who would share one is refused, on all processes alike."""

from __future__ import annotations

import os
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from chunkplan.errors import UsageError
from chunkplan_runtime.distributed.job import OwnGpu, check_gpus, find_own_gpu, joined
from tests.support.distributed_cases import refuse_gpus
from tests.support.ports import free_port

NO_GPU = OwnGpu("node0", 0, 0, None)


def gpu(uuid, index=0, num_seen=1, machine="node0"):
    return OwnGpu(machine, index, num_seen, uuid)


@pytest.mark.parametrize(
    "processes",
    [
        [NO_GPU, NO_GPU],
        [gpu("a", 0, 2), gpu("b", 1, 2)],
        [gpu("a"), gpu("b")],  # each is shown one of its own
        [gpu("a", 0, 2), gpu("d", 1, 2)],  # two of its own
        [gpu("a", machine="node0"), gpu("b", machine="node1")],
        [gpu("a")],
    ],
    ids=["none", "all see all", "each sees its own", "each sees two", "two machines", "one"],
)
def test_processes_with_gpus_of_their_own_are_taken(processes):
    check_gpus(processes)


@pytest.mark.parametrize(
    ("processes", "message"),
    [
        ([gpu("GPU-a"), gpu("GPU-a")], r"processes 0 and 1 of 2 would share a GPU \(GPU-a\)"),
        ([gpu("GPU-a"), gpu("GPU-b"), gpu("GPU-b", 1, 2)], r"processes 1 and 2 of 3 would share a GPU \(GPU-b\)"),
        # Two containers of one machine have names of their own.
        ([gpu("GPU-a"), gpu("GPU-a", machine="node1")], r"processes 0 and 1 of 2 would share a GPU"),
        ([gpu("a", 0, 2), gpu("b", 1, 2), gpu(None, 2, 2)], "process 2 of 3 would take GPU 2, and sees 2"),
        ([gpu("a"), NO_GPU], "process 1 of 2 would take GPU 0, and sees 0"),
    ],
)
def test_processes_without_a_gpu_of_their_own_are_named(processes, message):
    with pytest.raises(UsageError, match=message) as raised:
        check_gpus(processes)
    assert raised.value.where in ("node0", "node1") and "--device cpu" in raised.value.hint


def test_every_process_refuses_what_two_of_them_share(pool):
    """Two processes, over gloo: the one that has nothing to complain about does as well."""
    for own, said in (
        ([gpu("a"), gpu("b")], None),
        ([gpu("a"), gpu("a")], "node0: processes 0 and 1 of 2 would share a GPU (a)"),
        ([gpu("a"), gpu(None, 1, 0)], "node0: process 1 of 2 would take GPU 1, and sees 0"),
    ):
        assert pool.run(2, refuse_gpus, gpus=own) == [said] * 2


@pytest.mark.parametrize(
    ("shown", "place", "index", "uuid"),
    [(["a", "b"], 1, 1, "b"), (["a"], 1, 0, "a"), (["a", "b"], 2, 2, None), (["a"], None, 0, "a")],
)
def test_a_process_takes_the_gpu_of_its_place_or_the_only_one(monkeypatch, shown, place, index, uuid):
    """By what the driver would tell."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(shown))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=shown[index]))
    monkeypatch.delenv("SLURM_LOCALID", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if place is not None:
        monkeypatch.setenv("LOCAL_RANK", str(place))
    found = find_own_gpu("auto")
    assert (found.index, found.num_seen, found.uuid) == (index, len(shown), uuid)
    assert find_own_gpu("cpu").uuid is None


def test_what_joins_from_python_has_cuda_not_wait_for_devices_either():
    one = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with patch.dict(os.environ, {**one, "CUDA_DEVICE_MAX_CONNECTIONS": "16"}):
        os.environ.pop("CUDA_MODULE_LOADING", None)
        with joined("cpu"):
            assert os.environ["CUDA_MODULE_LOADING"] == "EAGER"
            assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "16"
