"""The GGUF reader against the gguf package, and against files that lie."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.errors import ModelFileError, UnsupportedModelError
from ferrum_mlx.gguf import GGUFFile

TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
HEAD = b"GGUF" + struct.pack("<I", 3)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def pairs(count: int, raw: bytes) -> bytes:
    """A file of metadata alone."""
    return HEAD + struct.pack("<QQ", 0, count) + raw


def tensors(count: int, fmt: str, *numbers: int) -> bytes:
    """A file of one directory entry, `count` times, and some data."""
    return (
        HEAD + struct.pack("<QQ", count, 0) + (text(b"t") + struct.pack(fmt, *numbers)) * count + b"\0" * 99
    )


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, write_gguf: Callable[..., Any]) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "sound.gguf"
    write_gguf(path, "Q4_1")
    return path.read_bytes()


@pytest.mark.parametrize("kind", TYPES)
def test_values_equal_the_gguf_packages(kind: str, tmp_path: Path, write_gguf: Callable[..., Any]) -> None:
    expected = write_gguf(tmp_path / "m.gguf", kind)
    file = GGUFFile(tmp_path / "m.gguf")
    assert set(file.tensors) == set(expected)
    assert {tensor.type for tensor in file.tensors.values()} == {"F32", kind}
    for name, values in expected.items():
        assert file.tensors[name].shape == values.shape
        np.testing.assert_array_equal(file.read(name), values, strict=True)


def test_the_default_models_header(smollm2: ResolvedModel) -> None:
    import gguf

    file, reference = GGUFFile(smollm2.path), gguf.GGUFReader(smollm2.path)
    assert {t.name: (t.tensor_type.name, t.data_offset, t.n_bytes) for t in reference.tensors} == {
        t.name: (t.type, t.offset, t.nbytes) for t in file.tensors.values()
    }
    keys = [key for key in reference.fields if not key.startswith("GGUF.")]
    assert list(file.metadata) == keys
    for key in keys:
        value = reference.fields[key].contents()
        np.testing.assert_array_equal(np.asarray(file.metadata[key]), np.asarray(value))
    for tensor in reference.tensors[:10]:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(file.read(tensor.name), expected)


HOSTILE = {
    "empty": b"",
    "not GGUF": b"PK\x03\x04" + b"\0" * 100,
    "only the magic": b"GGUF",
    "2^63 pairs": pairs(2**63, b"\0" * 64),
    "2^63 tensors": HEAD + struct.pack("<QQ", 2**63, 0) + b"\0" * 64,
    "a key of 2^64-1 bytes": pairs(1, struct.pack("<Q", 2**64 - 1)),
    "a list of 2^60 texts": pairs(1, text(b"k") + struct.pack("<IIQ", 9, 8, 2**60)),
    "an array of 2^61 numbers": pairs(1, text(b"k") + struct.pack("<IIQ", 9, 12, 2**61)),
    "nested arrays": pairs(1, text(b"k") + struct.pack("<IIQ", 9, 9, 1) * 50),
    "an unknown metadata type": pairs(1, text(b"k") + struct.pack("<II", 99, 0)),
    "a key twice": pairs(2, (text(b"k") + struct.pack("<II", 4, 0)) * 2),
    "a key that is no UTF-8": pairs(1, text(b"\xff") + struct.pack("<II", 4, 0)),
    "alignment 0": pairs(1, text(b"general.alignment") + struct.pack("<II", 4, 0)),
    "alignment a text": pairs(1, text(b"general.alignment") + struct.pack("<I", 8) + text(b"x")),
    "2^63 rows": tensors(1, "<IQQIQ", 2, 32, 2**63, 0, 0),
    "no rows": tensors(1, "<IQIQ", 1, 0, 0, 0),
    "2^32-1 dimensions": tensors(1, "<I", 2**32 - 1),
    "half a block": tensors(1, "<IQIQ", 1, 33, 2, 0),
    "an offset past the end": tensors(1, "<IQIQ", 1, 1, 0, 2**40),
    "a tensor twice": tensors(2, "<IQIQ", 1, 1, 0, 0),
}


@pytest.mark.parametrize("lie", HOSTILE)
def test_a_lying_header_is_one_clear_error(lie: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(HOSTILE[lie])
    tracemalloc.start()
    with pytest.raises(ModelFileError) as caught:
        GGUFFile(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert peak < 1 << 20


def test_tensors_may_not_share_bytes(tmp_path: Path) -> None:
    entry = struct.pack("<IQIQ", 1, 8, 0, 0)
    path = tmp_path / "m.gguf"
    path.write_bytes(HEAD + struct.pack("<QQ", 2, 0) + text(b"a") + entry + text(b"b") + entry + b"\0" * 200)
    with pytest.raises(ModelFileError, match="overlaps"):
        GGUFFile(path)


def test_a_header_longer_than_any_real_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with open(path, "wb") as file:
        array = struct.pack("<IIQ", 9, 0, 1 << 30)
        file.write(HEAD + struct.pack("<QQ", 0, 1) + text(b"k") + array)
        file.truncate(2 << 30)  # sparse: takes no disk
    with pytest.raises(ModelFileError, match="largest header"):
        GGUFFile(path)


@pytest.mark.parametrize("kind", ["I8", "Q8_K", "F64", "200"])
def test_other_types_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    import gguf

    number = int(kind) if kind.isdigit() else gguf.GGMLQuantizationType[kind].value
    path = tmp_path / "m.gguf"
    path.write_bytes(HEAD + struct.pack("<QQ", 1, 0) + text(b"t") + struct.pack("<IQIQ", 1, 256, number, 0))
    with pytest.raises(UnsupportedModelError, match=rf"{kind}.*F32, F16, BF16.*Q4_K"):
        GGUFFile(path)


def test_a_big_endian_or_old_file_is_refused_by_version(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for version in (struct.pack(">I", 3), struct.pack("<I", 1)):
        path.write_bytes(b"GGUF" + version + b"\0" * 64)
        with pytest.raises(UnsupportedModelError, match="version"):
            GGUFFile(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot read"):
        GGUFFile(tmp_path / "none.gguf")


@pytest.mark.parametrize("kind", ["F16", "Q4_0", "Q4_1", "Q8_0"])
def test_a_damaged_scale_is_read_as_it_is(kind: str, tmp_path: Path, write_gguf: Callable[..., Any]) -> None:
    """A signalling NaN warns in arithmetic; what is wrong with the model is said at its load."""
    path = tmp_path / "m.gguf"
    write_gguf(path, kind)
    start = GGUFFile(path).tensors["token_embd.weight"].offset
    content = bytearray(path.read_bytes())
    content[start : start + 2] = b"\x01\x7c"
    path.write_bytes(content)
    values = GGUFFile(path).read("token_embd.weight").reshape(-1)
    assert np.isnan(values[0])
    assert np.isfinite(values[32:]).all()


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_truncation_is_found(data: st.DataObject, sound: bytes, tmp_path: Path) -> None:
    length = data.draw(st.integers(0, len(sound) - 64))  # the last bytes may be padding
    path = tmp_path / "cut.gguf"
    path.write_bytes(sound[:length])
    with pytest.raises(ModelFileError):
        GGUFFile(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_bytes_never_crash(data: st.DataObject, sound: bytes, tmp_path: Path) -> None:
    """A changed header is a clear error or another sound file, whose tensors can all be read."""
    changed = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 2000))
        changed[at] = data.draw(st.integers(0, 255))
    path = tmp_path / "changed.gguf"
    path.write_bytes(changed)
    try:
        file = GGUFFile(path)
    except (ModelFileError, UnsupportedModelError):
        return
    for name in file.tensors:
        assert file.read(name).shape == file.tensors[name].shape
