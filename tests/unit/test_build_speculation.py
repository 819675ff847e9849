"""Who guesses, and how two models share the memory, over models that are only said to be loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from ferrum_mlx.backends.fake import FakeExecutor
from ferrum_mlx.build import build_engine
from ferrum_mlx.build_speculation import build_executors, check_same_vocabulary
from ferrum_mlx.config import DRAFT_TOKENS, EngineConfig
from ferrum_mlx.errors import UsageError
from ferrum_mlx.executor import ModelExecutor
from ferrum_mlx.kv.sequence import KVGroup
from ferrum_mlx.kv.sizing import plan_pools
from ferrum_mlx.model_info import Capabilities, ModelInfo
from ferrum_mlx.speculative.draft_model import DraftModelProposer
from ferrum_mlx.speculative.ngram import NgramProposer
from ferrum_mlx.speculative.speculation import Speculation

from .tiny_tokenizers import byte_level

FREE = 10_000


class Narrow(FakeExecutor):
    """Its device verifies 8 rows in one go."""

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), max_verify_rows=8)


@dataclass
class Model:
    """Stands in for a backend's loaded model; `built` are the config and the bytes of each executor."""

    name: str = "target"
    layers: int = 12
    has_state: bool = False
    limit: int = 1000
    make: Callable[[EngineConfig], ModelExecutor] = FakeExecutor
    built: list[tuple[EngineConfig, float]] = field(default_factory=list)
    route = "by hand"
    free_memory = FREE

    @property
    def info(self) -> ModelInfo:
        info = FakeExecutor(EngineConfig()).info
        return replace(info, model_id=self.name, num_layers=self.layers, max_sequence_length=self.limit)

    @property
    def kv_bytes_per_token(self) -> int:
        return 10 * self.layers

    def first_layers(self, count: int) -> Model:
        return replace(self, name=f"{count} layers", layers=count)

    def executor(
        self, config: EngineConfig, narrate: Callable[[str], None], free_memory: int, share: float = 1.0
    ) -> tuple[ModelExecutor, list[str]]:
        self.built.append((config, free_memory * share))
        return self.make(config), [f"{self.name} is built"]


def build(
    kind: str, model: Model | None = None, draft: Model | None = None, **settings: object
) -> tuple[Speculation | None, list[str], Model]:
    model = model or Model()
    config = EngineConfig(speculative=kind, **settings)
    executor, speculation, notes = build_executors(model, config, lambda what: None, lambda name: draft)
    assert isinstance(executor, FakeExecutor)
    return speculation, notes, model


def proposer_of(speculation: Speculation | None) -> object:
    assert speculation is not None
    return speculation._proposer


def test_one_of_several_engines_takes_its_share_of_the_memory() -> None:
    _, _, model = build("off", memory_share=0.5)
    assert [bytes_ for _, bytes_ in model.built] == [FREE / 2]
    for share in (0, 1.5, "half"):
        with pytest.raises(UsageError, match="memory_share"):
            EngineConfig(memory_share=share)  # type: ignore[arg-type]


@pytest.mark.parametrize("kv_memory", [None, FREE // 2])
def test_a_share_is_of_the_pool_that_one_engine_would_have(kv_memory: int | None) -> None:
    """Of --kv-memory, too, which is said once and is for both."""
    sized: list[int] = []

    class Sized(Model):
        def executor(
            self, config: EngineConfig, narrate: Callable[[str], None], free_memory: int, share: float = 1.0
        ) -> tuple[ModelExecutor, list[str]]:
            group = KVGroup(layers=(0,), window=None, bytes_per_token=1)
            sized.extend(plan_pools([group], config, self.limit, free_memory, share=share).num_blocks)
            return super().executor(config, narrate, free_memory, share)

    for share in (1.0, 0.5):
        build("off", Sized(limit=10_000), memory_share=share, kv_memory=kv_memory)
    whole, half = (blocks + 1 for blocks in sized)  # with the null block
    assert whole == FREE // 2 // 16
    assert half == whole // 2


def test_off_and_ngram_need_no_second_model() -> None:
    assert build("off")[0] is None
    speculation, notes, model = build("ngram")
    assert isinstance(proposer_of(speculation), NgramProposer)
    assert notes == ["target is built"]
    assert [size for _, size in model.built] == [FREE]
    assert speculation._max_drafts == DRAFT_TOKENS


def test_both_pools_hold_the_same_number_of_tokens() -> None:
    draft = Model("small", layers=3)
    speculation, notes, model = build("draft:small", draft=draft)
    assert isinstance(proposer_of(speculation), DraftModelProposer)
    ((_, own),), ((_, other),) = model.built, draft.built
    assert own + other == pytest.approx(FREE)
    assert own / model.kv_bytes_per_token == pytest.approx(other / draft.kv_bytes_per_token)
    assert "guesses come from small, with 20% of the memory for KV" in notes
    assert "the draft model: small is built" in notes


def test_self_takes_a_quarter_of_the_layers() -> None:
    _, notes, _ = build("self")
    assert "guesses come from 3 layers, with 20% of the memory for KV" in notes


def test_a_draft_model_is_not_asked_for_more_than_its_own_context() -> None:
    draft = Model("small", limit=100)
    build("draft:small", draft=draft, max_model_len=500)
    assert draft.built[0][0].max_model_len == 100
    roomy = Model("small", limit=0)  # unknown
    build("draft:small", draft=roomy, max_model_len=500)
    assert roomy.built[0][0].max_model_len == 500


@pytest.mark.parametrize("kind", ["ngram", "self", "draft:small"])
def test_a_state_that_cannot_be_rolled_back_is_said_at_load(kind: str) -> None:
    speculation, notes, model = build(kind, Model(has_state=True), Model("small"))
    assert speculation is None
    assert notes[-1].startswith("runs without speculation: target carries a state")
    assert [size for _, size in model.built] == [FREE]


def test_nor_may_the_draft_model_have_one() -> None:
    with pytest.raises(UsageError, match="small carries a state"):
        build("draft:small", draft=Model("small", has_state=True))


def test_no_more_than_the_device_verifies_in_one_go() -> None:
    speculation, notes, _ = build("ngram", Model(make=Narrow))
    assert speculation._max_drafts == 7
    assert len(notes) == 1
    speculation, notes, _ = build("ngram", Model(make=Narrow), draft_tokens=20)
    assert speculation._max_drafts == 7
    assert notes[-1] == "--draft-tokens is 20; this device verifies no more than 7 cheaply"
    assert build("ngram", Model(make=Narrow), draft_tokens=4)[0]._max_drafts == 4


def test_another_vocabulary_is_refused_by_name() -> None:
    tokenizer, other = byte_level(), byte_level()
    check_same_vocabulary(tokenizer, other, "a", "b")
    other._hf.add_tokens(["<another>"])
    with pytest.raises(UsageError, match=r"the draft model b has another vocabulary than a: .* 1 of them"):
        check_same_vocabulary(tokenizer, other, "a", "b")


def test_nor_may_a_guess_be_an_id_that_the_target_lacks() -> None:
    class Wide(FakeExecutor):
        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config)
            self.info = replace(self.info, vocab_size=300)

    with pytest.raises(UsageError, match="gives 300 logits; allowed: at most 258"):
        build("draft:wide", draft=Model("wide", make=Wide))
    build("draft:narrow", Model(make=Wide), Model("narrow"))


@pytest.mark.parametrize("kind", ["off", "ngram", "self", "draft:fake"])
def test_the_fake_has_all_of_them(kind: str) -> None:
    engine = build_engine(EngineConfig(backend="fake", speculative=kind))
    assert (engine.speculation is not None) is (kind != "off")
    engine.shutdown()


@pytest.mark.parametrize("value", ["draft", "draft:", "on", "", None, 4])
def test_a_kind_that_there_is_not(value: object) -> None:
    with pytest.raises(
        UsageError, match=r"speculative is .*allowed: 'off', 'ngram', 'self', or 'draft:MODEL'"
    ):
        EngineConfig(speculative=value)


def test_a_number_of_drafts_needs_someone_who_drafts() -> None:
    with pytest.raises(UsageError, match=r"draft_tokens is 4, and nothing drafts.*--speculative ngram"):
        EngineConfig(draft_tokens=4)
    with pytest.raises(UsageError, match="draft_tokens is 0; allowed: a whole number of at least 1"):
        EngineConfig(draft_tokens=0, speculative="ngram")
    assert EngineConfig(draft_tokens=4, speculative="self").draft_tokens == 4
