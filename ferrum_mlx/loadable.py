"""Whether a model that lies here can be loaded, as far as the headers of its files tell.

For who would give up a working engine for it. No network, no array library, no weights: what these find
only, loading finds.
"""

from __future__ import annotations

from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from ferrum_mlx import checkpoint, hub
from ferrum_mlx.errors import UnsupportedModelError, shown
from ferrum_mlx.files import readable
from ferrum_mlx.fit import check_files

# By backend: the library whose model classes it takes, and its files that have model types in quotes.
_LIBRARY = {"mlx": "mlx_lm", "torch": "transformers"}
_TYPES_IN = {
    "mlx_lm": ("utils.py",),
    "transformers": ("models/auto/auto_mappings.py", "models/auto/configuration_auto.py"),
}


@readable
def check_loadable(model: str, backend: str) -> None:
    """Check a model's files before anything is given up for it.

    Args:
        backend: mlx or torch.

    Raises:
        ModelNotFoundError: it is not on this machine.
        ModelFileError: files that are incomplete, damaged or contradict each other.
        UnsupportedModelError: an architecture or a packing that the backend has no class for.
    """
    resolved = hub.resolve(model, offline=True, backend=backend)
    if resolved.format == "gguf":
        from ferrum_mlx.gguf_weights import GGUFWeights

        GGUFWeights(resolved.gguf)
        return
    check_files(resolved.path, backend)
    kind, library = checkpoint.read_json(resolved.path / "config.json")["model_type"], _LIBRARY[backend]
    if not _may_know(library, kind):
        raise UnsupportedModelError(
            f"{resolved.path} is of model type {shown(kind)}, which {library} does not know",
            next_step="choose another model",
        )


def _may_know(library: str, kind: str) -> bool:
    """Whether a library has a class for a model type; also where it is not laid out as we know it."""
    spec = find_spec(library)  # of the top level: nothing is imported
    if spec is None or not spec.submodule_search_locations:
        return True
    root = Path(spec.submodule_search_locations[0])
    files = [root / name for name in _TYPES_IN[library]]
    said = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
    if f'"{kind}"' in said or '"llama"' not in said:
        return True
    return library == "mlx_lm" and PathFinder.find_spec(kind, [str(root / "models")]) is not None
