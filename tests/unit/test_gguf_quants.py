"""Values and codes of GGUF's quantizations, against the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from ferrum_mlx import gguf_quants

AFFINE = {"Q8_0": 8, "Q4_0": 4, "Q4_1": 4, "Q4_K": 4}


def blocks(kind: str, rows: int, seed: int = 0) -> tuple[np.ndarray, tuple[int, int]]:
    """Random bytes of `rows` rows of two blocks, and the shape that they have unpacked."""
    per_block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = np.random.default_rng(seed).integers(0, 256, rows * 2 * nbytes, dtype=np.uint8)
    return raw, (rows, 2 * per_block)


def test_what_is_readable_is_what_the_package_can_unpack() -> None:
    can = set()
    for number, kind in gguf_quants.kinds().items():
        try:
            gguf.dequantize(np.zeros((1, kind.nbytes), np.uint8), gguf.GGMLQuantizationType(number))
        except NotImplementedError:
            continue
        can.add(kind.name)
    assert can - set(gguf_quants.READABLE) <= {"NVFP4"}  # its scales are in a tensor of their own
    assert set(gguf_quants.READABLE) <= can | {"F16", "F32"}


@pytest.mark.parametrize("kind", [kind for kind in gguf_quants.READABLE if kind not in ("F32", "F16")])
@pytest.mark.filterwarnings("ignore:(overflow|invalid):RuntimeWarning")  # of the reference, over random bytes
def test_values_are_the_packages(kind: str) -> None:
    raw, shape = blocks(kind, 6)
    expected = gguf.dequantize(raw.reshape(6, -1), gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(gguf_quants.values(kind, raw, shape), expected, strict=True)
    cube = gguf_quants.values(kind, raw, (2, 3, shape[1]))
    np.testing.assert_array_equal(cube, expected.reshape(2, 3, -1))


@pytest.mark.parametrize("kind", gguf_quants.READABLE)
def test_codes_scales_and_biases_give_the_values(kind: str) -> None:
    raw, shape = blocks(kind, 40, seed=1)
    parts = gguf_quants.codes(kind, raw, shape)
    if kind not in AFFINE:
        assert parts is None
        return
    assert parts is not None
    assert parts.bits == AFFINE[kind]
    assert parts.codes.max() == 2**parts.bits - 1
    scales, biases = (np.repeat(np.float32(part), 32, axis=-1) for part in (parts.scales, parts.biases))
    expected = gguf_quants.values(kind, raw, shape)
    sound = np.isfinite(expected)
    assert sound.mean() > 0.9
    with np.errstate(invalid="ignore"):  # random bytes are also scales that are no numbers
        found = parts.codes.astype(np.float32) * scales + biases
    np.testing.assert_array_equal(found[sound], expected[sound])

    order = np.arange(40)[::-1]
    np.testing.assert_array_equal(parts.rows(order).codes, parts.codes[::-1])
