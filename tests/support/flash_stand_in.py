"""What the operators of FlashAttention-2 do, on a CPU and in any float: what tests of our calls put in their place.

The rules of masks and layouts are those of `mha_varlen_fwd` and `mha_varlen_bwd` in csrc/flash_attn/flash_api.cpp of
flash-attn 2.8.3, which PyTorch has a copy of. What a GPU would refuse is refused here.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: As `flash_attn/flash_attn_interface.py` of flash-attn 2.8.0.post2, 2.8.1, 2.8.2, 2.8.3 and 2.8.3.post2 has them.
PUBLISHED = {
    "_flash_attn_varlen_forward": (
        "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, int max_seqlen_k, "
        "float dropout_p, float softmax_scale, bool causal, int window_size_left=-1, int window_size_right=-1, "
        "float softcap=0.0, Tensor? alibi_slopes=None, bool return_softmax=False, Tensor? block_table=None, "
        "Tensor? leftpad_k=None, Tensor? seqused_k=None, bool zero_tensors=False) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "_flash_attn_varlen_backward": (
        "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a6!)? dq, Tensor(a7!)? dk, "
        "Tensor(a8!)? dv, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, int max_seqlen_k, "
        "float dropout_p, float softmax_scale, bool causal, int window_size_left, int window_size_right, "
        "float softcap, Tensor? alibi_slopes, bool deterministic, Tensor? rng_state=None, "
        "bool zero_tensors=False) -> Tensor"
    ),
}


#: As `flash_attn/cute/interface.py` of flash-attn-4 4.0.0b36 has them: what is called by name, and has no other name.
PUBLISHED_4 = {
    "_flash_attn_fwd": (
        "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, "
        "max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None, "
        "window_size_left=None, window_size_right=None, learnable_sink=None, return_lse=False"
    ),
    "_flash_attn_bwd": (
        "q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None, "
        "window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
        "max_seqlen_q=None, max_seqlen_k=None, deterministic=False"
    ),
}


def write_package_4(folder: Path, _: str, signatures: dict[str, str] = PUBLISHED_4, needs: str = "math") -> None:
    """A package `flash-attn-4`, which is a folder of `flash_attn` and brings no file of that; it imports `needs`."""
    (folder / "flash_attn" / "cute").mkdir(parents=True)
    lines = [f"import {needs}", "from tests.support import flash_stand_in"]
    for name, signature in signatures.items():
        lines.append(f"def {name}({signature}):\n    return flash_stand_in.{name.removeprefix('_')}(locals())")
    (folder / "flash_attn" / "cute" / "interface.py").write_text("\n".join(lines) + "\n")
    _write_metadata(folder, "flash-attn-4", "4.0.0b36")


def write_package(folder: Path, namespace: str, version: str = "2.8.3", signatures: dict[str, str] = PUBLISHED) -> None:
    """A package `flash_attn` in `folder` whose operators are in `namespace`, so that several can have been imported."""
    package = folder / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text(f'__version__ = "{version}"\n')
    _write_metadata(folder, "flash-attn", version)
    lines = [
        "import torch",
        "from tests.support import flash_stand_in",
        f'library = torch.library.Library("{namespace}", "DEF")',
    ]
    for name, signature in signatures.items():
        lines.append(f'library.define("{name}{signature}")')
        lines.append(f'library.impl("{name}", flash_stand_in.{name.lstrip("_")}, "CPU")')
        lines.append(f"_wrapped{name} = torch.ops.{namespace}.{name}")
    (package / "flash_attn_interface.py").write_text("\n".join(lines) + "\n")


def _write_metadata(folder: Path, name: str, version: str) -> None:
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")


def flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of flash-attn. q [queries, heads, head_dim], k and v [keys, kv_heads, head_dim]; lse [heads, queries]."""
    assert dropout_p == 0 and not any(rest)
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse = torch.zeros_like(q), q.new_full((q.shape[1], q.shape[0]), torch.inf, dtype=_wide(q))
    window = causal, window_size_left, window_size_right, max_seqlen_k
    for queries, keys in _runs(cu_seqlens_q, cu_seqlens_k):
        scores, _ = _scores(q[queries], k[keys], softmax_scale, softcap, window)
        norm = scores.logsumexp(-1)
        weights = (scores - norm[..., None]).exp().nan_to_num()  # a query without a key gets nothing
        out[queries] = (weights @ _heads(v[keys], q)).transpose(0, 1).to(q.dtype)
        lse[:, queries] = norm.masked_fill(norm == -torch.inf, torch.inf)
    return out, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64)


def flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    *rest: Any,
) -> Tensor:
    """Of flash-attn: fills dq, dk and dv, by `out` and `softmax_lse` as they are given."""
    assert dropout_p == 0 and not any(rest)
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    assert dout.shape == out.shape == q.shape and dout.dtype == out.dtype == q.dtype
    assert softmax_lse.shape == (q.shape[1], q.shape[0]) and softmax_lse.dtype == _wide(q)
    assert all(tensor.stride(-1) == 1 for tensor in (dout, out, dq, dk, dv)) and softmax_lse.is_contiguous()
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
    groups = q.shape[1] // k.shape[1]
    delta = (dout.to(_wide(q)) * out.to(_wide(q))).sum(-1).T
    window = causal, window_size_left, window_size_right, max_seqlen_k
    for queries, keys in _runs(cu_seqlens_q, cu_seqlens_k):
        scores, slope = _scores(q[queries], k[keys], softmax_scale, softcap, window)
        weights = (scores - softmax_lse[:, queries, None]).exp()
        sent = dout[queries].transpose(0, 1).to(_wide(q))
        inner = weights * (sent @ _heads(v[keys], q).mT - delta[:, queries, None]) * slope * softmax_scale
        asked = q[queries].transpose(0, 1).to(_wide(q))
        dq[queries] = (inner @ _heads(k[keys], q)).transpose(0, 1).to(q.dtype)
        dk[keys] = _summed(inner.mT @ asked, groups).to(q.dtype)
        dv[keys] = _summed(weights.mT @ sent, groups).to(q.dtype)
    return delta


def flash_attn_fwd(asked: dict[str, Any]) -> tuple[Tensor | None, ...]:
    """Of flash-attn-4: out, LSE, and three more."""
    assert asked["return_lse"] is True
    out, lse, *_ = flash_attn_varlen_forward(*(asked[name] for name in "qkv"), *_how(asked))
    return out, lse, None, None, None


def flash_attn_bwd(asked: dict[str, Any]) -> tuple[Tensor, ...]:
    """Of flash-attn-4."""
    assert asked["deterministic"] == torch.are_deterministic_algorithms_enabled()
    tensors = [asked[name] for name in "qkv"]
    gradients = [torch.empty_like(each) for each in tensors]
    given = asked["dout"], *tensors, asked["out"], asked["lse"]
    flash_attn_varlen_backward(*given, *gradients, *_how(asked), None, asked["deterministic"])
    return tuple(gradients)


def _how(asked: dict[str, Any]) -> list[Any]:
    """As flash-attn 2 has it: no bound of a window is -1 there."""
    bounds = [asked[name] for name in ("window_size_left", "window_size_right")]
    assert all(bound is None or bound >= 0 for bound in bounds)
    runs = [asked[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")]
    left, right = (-1 if bound is None else bound for bound in bounds)
    return [*runs, 0.0, asked["softmax_scale"], asked["causal"], left, right, asked["softcap"]]


def _check(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> None:
    for tensor, cu, longest in ((q, cu_q, max_q), (k, cu_k, max_k)):
        assert cu.dtype == torch.int32 and cu.is_contiguous()
        assert cu[0] == 0 and cu[-1] == len(tensor) and cu.diff().max() == longest
    assert cu_q.shape == cu_k.shape and q.dtype == k.dtype == v.dtype
    assert k.shape == v.shape and q.shape[2] == k.shape[2] and q.shape[1] % k.shape[1] == 0
    assert all(tensor.stride(-1) == 1 for tensor in (q, k, v))


def _runs(cu_q: Tensor, cu_k: Tensor) -> list[tuple[slice, slice]]:
    return [
        (slice(*queries), slice(*keys))
        for queries, keys in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True)
    ]


def _scores(
    q: Tensor, k: Tensor, scale: float, softcap: float, window: tuple[bool, int, int, int]
) -> tuple[Tensor, Tensor]:
    """[heads, queries, keys], -inf where unseen, and the slope of the softcap."""
    causal, left, right, longest = window
    scores = q.transpose(0, 1).to(_wide(q)) @ _heads(k, q).mT * scale
    slope = torch.ones_like(scores)
    if softcap > 0:
        bent = torch.tanh(scores / softcap)
        scores, slope = softcap * bent, 1 - bent**2
    right = 0 if causal else right
    left, right = (-1 if bound >= longest else bound for bound in (left, right))
    if left >= 0 or right >= 0:
        left, right = (longest if bound < 0 else bound for bound in (left, right))
        place = torch.arange(len(q))[:, None] + len(k) - len(q)
        keys = torch.arange(len(k))
        scores = scores.masked_fill((keys < place - left) | (keys > place + right), -torch.inf)
    return scores, slope


def _heads(tensor: Tensor, q: Tensor) -> Tensor:
    """[keys, kv_heads, head_dim] as [heads, keys, head_dim]."""
    return tensor.transpose(0, 1).repeat_interleave(q.shape[1] // tensor.shape[1], 0).to(_wide(q))


def _summed(tensor: Tensor, groups: int) -> Tensor:
    """[heads, keys, head_dim] as [keys, kv_heads, head_dim]."""
    return tensor.unflatten(0, (-1, groups)).sum(1).transpose(0, 1)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
