"""Norms and rotary embeddings of a recorded forward become one call each, and give what torch gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'ferrum-mlx[torch]'")
pytest.importorskip("numba", reason="numba is not installed: pip install 'ferrum-mlx[cpu]'")

import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from ferrum_mlx.backends.torch import cpu_rows, idioms
from ferrum_mlx.backends.torch.cpu_rows import Norm, Rotation
from ferrum_mlx.backends.torch.idioms import shortened
from ferrum_mlx.backends.torch.recording import Recorder, compiled

SIZE = 64
Forward = Callable[..., torch.Tensor]


def recorded(forward: Forward, *given: torch.Tensor) -> Recorder:
    recorder = Recorder(*given, once=True)
    with torch.inference_mode(), recorder:
        recorder.out = recorder.name_of(forward(*given))  # type: ignore[attr-defined]
    return recorder


@pytest.fixture
def compiled_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The compiled functions that were called."""
    called: list[str] = []

    def counted(name: str, original: Any) -> None:
        def call(*args: Any) -> None:
            called.append(name)
            original(*args)

        monkeypatch.setattr(cpu_rows, name, call)

    for name in ("_normed", "_rotated"):
        counted(name, getattr(cpu_rows, name))
    return called


def both(forward: Forward, *given: torch.Tensor) -> tuple[list[Any], torch.Tensor, torch.Tensor]:
    """The functions of the shortened program, what it gives, and what the forward gives."""
    recorder = recorded(forward, *given)
    output = recorder.out  # type: ignore[attr-defined]
    calls = shortened(recorder.calls, output)
    program = compiled(calls, recorder.given, recorder.constants, output)
    with torch.inference_mode():
        return [call.function for call in calls], program(*given), forward(*given)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma2RMSNorm])
def test_a_norm_is_one_call(kind: Any, rows: int, compiled_calls: list[str]) -> None:
    norm = kind(SIZE, eps=1e-3).requires_grad_(False)
    torch.nn.init.normal_(norm.weight)
    functions, got, want = both(norm, torch.randn(1, rows, SIZE))
    assert [type(each) for each in functions].count(Norm) == 1
    assert compiled_calls == ["_normed"]
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_a_norm_is_as_exact_as_float32_can_be() -> None:
    x, weight = torch.randn(50, 1536) * 30, torch.randn(1536)
    want = norm_of(x.double(), weight.double()).float()
    torch.testing.assert_close(Norm(1e-5)(x, weight), want, rtol=2.5e-7, atol=0)


def rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    by_head = (each.view(1, each.shape[1], -1, SIZE).transpose(1, 2) for each in (q, k))
    turned_q, turned_k = apply_rotary_pos_emb(*by_head, cos, sin)
    return torch.cat([turned_q, turned_k], dim=1)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_rotary_embedding_is_one_call(rows: int, together: bool, compiled_calls: list[str]) -> None:
    """Of q and k apart, or both views into the same rows."""
    angles, qk = torch.randn(1, rows, SIZE), torch.randn(1, rows, 4 * SIZE)
    q, k = qk.split([3 * SIZE, SIZE], dim=-1)
    given = (*((q, k) if together else (q.contiguous(), k.contiguous())), angles.cos(), angles.sin())
    functions, got, want = both(rotary, *given)
    assert [type(each) for each in functions].count(Rotation) == 2
    assert compiled_calls == ["_rotated"] * 2
    assert len(functions) == 9  # 4 views and transpositions, 2 of cos and sin, these 2 and the cat
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_a_row_is_the_same_in_any_company() -> None:
    x, weight, angles = torch.randn(1, 5, 2, SIZE), torch.randn(SIZE), torch.randn(1, 1, 5, SIZE)
    norm, turn = Norm(1e-5), Rotation(SIZE // 2)
    by_head = x.transpose(1, 2)
    together = norm(x, weight), turn(by_head, angles.cos(), angles.sin())
    for i in range(5):
        row = slice(i, i + 1)
        assert torch.equal(norm(x[:, row], weight), together[0][:, row])
        alone = turn(by_head[:, :, row], angles.cos()[:, :, row], angles.sin()[:, :, row])
        assert torch.equal(alone, together[1][:, :, row])


def norm_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


def turn_of(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos + torch.cat([-x[..., 32:], x[..., :32]], dim=-1) * sin


@pytest.mark.parametrize(
    "given",
    [
        (torch.randn(1, 2, SIZE, dtype=torch.float64), torch.randn(SIZE, dtype=torch.float64)),
        (torch.randn(1, SIZE, 2).transpose(1, 2), torch.randn(SIZE)),
        (torch.randn(1, 2, SIZE), torch.randn(2, SIZE)),
        (torch.randn(1, 2, SIZE), torch.randn(2 * SIZE)[::2]),
    ],
    ids=["float64", "rows not in a row", "a weight for each row", "a weight in steps"],
)
def test_what_the_compiled_norm_does_not_take_goes_through_torch(
    given: tuple[torch.Tensor, ...], compiled_calls: list[str]
) -> None:
    assert torch.equal(Norm(1e-5)(*given), norm_of(*given))
    assert not compiled_calls


@pytest.mark.parametrize(
    ("x", "angles"),
    [
        (torch.randn(1, 2, 3, SIZE, dtype=torch.float64), torch.randn(1, 1, 3, SIZE, dtype=torch.float64)),
        (torch.randn(2, 2, 3, SIZE), torch.randn(1, 1, 3, SIZE)),
        (torch.randn(1, 2, 3, 2 * SIZE)[..., ::2], torch.randn(1, 1, 3, SIZE)),
        (torch.randn(1, 2, 3, SIZE), torch.randn(1, 2, 3, SIZE)),
        (torch.randn(1, 2, 3, SIZE), torch.randn(1, 1, 1, SIZE)),
        (torch.randn(1, 2, 3, 80), torch.randn(1, 1, 3, 80)),
    ],
    ids=["float64", "a batch", "every other number", "angles by head", "one angle for all", "not in halves"],
)
def test_what_the_compiled_rotation_does_not_take_goes_through_torch(
    x: torch.Tensor, angles: torch.Tensor, compiled_calls: list[str]
) -> None:
    cos, sin = angles.cos(), angles.sin()
    assert torch.equal(Rotation(32)(x, cos, sin), turn_of(x, cos, sin))
    assert not compiled_calls


def used_twice(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return weight * scaled + scaled


def returned_as_well(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    weight * scaled
    return scaled


def of_something_else(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * ((x + 1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


def the_mean_of_all(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean([-2, -1], keepdim=True) + 1e-5))


def cubed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-5))


@pytest.mark.parametrize("forward", [used_twice, returned_as_well, of_something_else, the_mean_of_all, cubed])
def test_what_only_looks_like_a_norm_stays(forward: Forward) -> None:
    """And the control: the norm itself does not."""
    given = torch.randn(1, 3, SIZE), torch.randn(SIZE)
    functions, got, want = both(forward, *given)
    assert Norm not in map(type, functions)
    assert torch.equal(got, want)
    assert Norm in map(type, both(norm_of, *given)[0])


@pytest.mark.parametrize(
    "parts",
    [
        lambda x: [x[..., 32:], x[..., :32]],
        lambda x: [-x[..., :32], x[..., 32:]],
        lambda x: [-x[..., 32:63], x[..., :33]],
        lambda x: [-(x + 1)[..., 32:], x[..., :32]],
    ],
    ids=["no minus", "the other half", "not to the end", "of something else"],
)
def test_what_only_looks_like_a_rotation_stays(parts: Any) -> None:
    def forward(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return x * cos + torch.cat(parts(x), dim=-1) * sin

    given = torch.randn(1, 2, 3, SIZE), torch.randn(1, 1, 3, SIZE), torch.randn(1, 1, 3, SIZE)
    functions, got, want = both(forward, *given)
    assert Rotation not in map(type, functions)
    assert torch.equal(got, want)
    assert Rotation in map(type, both(turn_of, *given)[0])


def test_without_numba_nothing_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idioms, "without_cpu_kernel", lambda: "numba is not installed")
    functions, got, want = both(norm_of, torch.randn(1, 3, SIZE), torch.randn(SIZE))
    assert Norm not in map(type, functions)
    assert torch.equal(got, want)
