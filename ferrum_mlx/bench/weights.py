"""`python -m ferrum_mlx.bench.weights`: what packed weights cost in quality and buy in speed, on this CPU.

A text is read by the model once in float32 and once with each kind of packed weights, as decode steps read
it (few rows) and as prefill does (many). Quality is what the text says of each: its NLL, the mean KL
divergence from float32's distribution, and how often both have the same likeliest token. Ends with one line
of JSON.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import click
import numpy as np

from ferrum_mlx.verify.compare import log_softmax
from ferrum_mlx.verify.likelihood import ROWS, nll
from ferrum_mlx.verify.texts import PROSE

if TYPE_CHECKING:
    from ferrum_mlx.backends.torch.executor import TorchExecutor

KINDS = {"float32": "float32", "int8": "int8", "int4": "int4", "": "as stored"}
FEW, MANY = 16, 512  # rows of a forward
ALLOWED = 0.01  # rise of NLL
DECODED = 24  # tokens a round


@dataclass(frozen=True, slots=True)
class Quality:
    """Of a text, in nats a token; beside the reference's distributions.

    Attributes:
        rise: of NLL, as a share of the reference's.
        top1: share of tokens whose likeliest id is the reference's.
    """

    nll: float
    rise: float
    kl: float
    top1: float


def quality(ours: np.ndarray, reference: np.ndarray, ids: Sequence[int]) -> Quality:
    """Logits [n, vocab] float32 each, of which row i is about ids[i + 1]; the last row is about nothing."""
    count, kl, agreed = len(ids) - 1, 0.0, 0
    for start in range(0, count, ROWS):
        q, p = (log_softmax(logits[:count][start : start + ROWS]) for logits in (ours, reference))
        kl += float((np.exp(p) * (p - q)).sum())
        agreed += int((q.argmax(-1) == p.argmax(-1)).sum())
    own = nll(ours, ids)
    return Quality(own, own / nll(reference, ids) - 1, kl / count, agreed / count)


@click.command(help="NLL, KL, top-1 agreement and speed of packed weights against float32 on this CPU.")
@click.option("-m", "--model", default="", help="Alias, hub repository, folder or .gguf file.")
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A text to read.")
@click.option("--tokens", default=512, type=click.IntRange(32), help="Tokens of it, at most.")
@click.option("--rounds", default=3, type=click.IntRange(1), help="Rounds of speed.")
def main(model: str, text: Path | None, tokens: int, rounds: int) -> None:
    from ferrum_mlx import hub
    from ferrum_mlx.tokenizer import load_tokenizer

    resolved = hub.resolve(model)
    ids = load_tokenizer(resolved).encode(text.read_text() if text else PROSE)[:tokens]
    click.echo(f"{resolved.name}: {len(ids)} tokens of {text or 'prose'}")
    executors: dict[str, TorchExecutor] = {}
    found: dict[str, dict[str, object]] = {}
    reference: np.ndarray | None = None
    for kind, name in KINDS.items():
        executor = executors[name] = load(model, kind)
        few = read(executor, ids, FEW)
        reference = few if reference is None else reference
        seen = {
            "few": quality(few, reference, ids),
            "many": quality(read(executor, ids, MANY), reference, ids),
        }
        found[name] = {
            "weights": executor.info.quantization,
            "bytes": executor.memory().parameter_bytes,
            **{rows: asdict(q) for rows, q in seen.items()},
        }
        click.echo(line(name, executor.memory().parameter_bytes, seen["few"], seen["many"]))
    for name, (decode, prefill) in speeds(executors, ids, rounds).items():
        found[name] |= {"decode_tps": decode, "prefill_tps": prefill}
        click.echo(f"{name}: decode {median(decode):.1f} tok/s, prefill {median(prefill):.0f} tok/s")
    click.echo(json.dumps(found))


def line(name: str, num_bytes: int, few: Quality, many: Quality) -> str:
    worst = max(few.rise, many.rise)
    return (
        f"{name}: {num_bytes / 1e9:.2f} GB; few rows: NLL {few.nll:.4f} ({few.rise:+.2%}), KL {few.kl:.5f}, "
        f"top-1 {few.top1:.1%}; many: {many.rise:+.2%}, KL {many.kl:.5f}, top-1 {many.top1:.1%}; "
        f"{'within' if worst < ALLOWED else 'ABOVE'} {ALLOWED:.0%}"
    )


def load(model: str, kind: str) -> TorchExecutor:
    """The model on the CPU with that kind of weights."""
    from ferrum_mlx import hub
    from ferrum_mlx.backends.torch import build, weights
    from ferrum_mlx.backends.torch.loader import stored_weights
    from ferrum_mlx.config import EngineConfig

    config = EngineConfig(model=model, device="cpu", max_model_len=1024)
    resolved = hub.resolve(model)
    loaded = build.load(resolved, config, lambda what: None, packed=False)
    if kind != "float32":
        words, _ = weights.pack(loaded.model, stored_weights(resolved), kind)
        info = replace(loaded.info, quantization=words, computes_in="bfloat16")
        loaded = replace(loaded, info=info)
    return loaded.executor(config, lambda what: None, loaded.free_memory // len(KINDS))[0]


def read(executor: TorchExecutor, ids: Sequence[int], rows: int) -> np.ndarray:
    """[len(ids), vocab] float32: a text in chunks of so many rows, on transformers' caches."""
    import torch
    from transformers import DynamicCache

    with executor.library_model() as model, torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the argument is to be called `cache` one day
        cache = DynamicCache(config=model.config)
        parts = [
            model(torch.tensor([ids[i : i + rows]]), past_key_values=cache, use_cache=True).logits[0]
            for i in range(0, len(ids), rows)
        ]
    logits: np.ndarray = torch.cat(parts).float().numpy()
    return logits


def speeds(
    executors: dict[str, TorchExecutor], ids: Sequence[int], rounds: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Decode and prefill tokens a second of every kind, round by round, behind one to warm up."""
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in executors}
    for i in range(rounds + 1):
        for name, executor in executors.items():
            steps = list(_seconds(executor, ids, f"{name} {i}"))
            if i:
                found[name][0].append(DECODED / sum(steps[1:]))
                found[name][1].append(len(ids) / steps[0])
    return found


def _seconds(executor: TorchExecutor, ids: Sequence[int], name: str) -> Iterator[float]:
    """Of the whole text in one step, then of DECODED single tokens."""
    from ferrum_mlx.batch import UnifiedItem
    from ferrum_mlx.capacity import Admitted, KvSlotRequest

    admitted = executor.try_admit_prefill(name, list(ids), use_prefix=False)
    if not isinstance(admitted, Admitted):
        raise click.ClickException(f"the KV pool cannot hold {len(ids)} tokens")
    cache, length, tokens = admitted.cache_id, 0, tuple(ids)
    for _ in range(DECODED + 1):
        start = perf_counter()
        executor.reserve_kv_slots([KvSlotRequest(cache, length + len(tokens))])
        item = UnifiedItem(cache_id=cache, q_tokens=tokens, pos_offset=length)
        length += len(tokens)
        tokens = executor.batch_prefill([item])[0].token_ids
        yield perf_counter() - start
    executor.release_cache(cache)


if __name__ == "__main__":
    main()
