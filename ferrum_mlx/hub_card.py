"""Whether a file is the one that a card names."""

from __future__ import annotations

from collections.abc import Callable

from ferrum_mlx.catalog import HubSource
from ferrum_mlx.errors import ModelFileError

_MOVING = "main"  # the revision that is a repository's newest commit


def check_against_card(source: HubSource, found: str, hub_checks: bool, say: Callable[[str], None]) -> None:
    """Whether a file may be another than the card names; if so, that is said.

    A card's sha256 is of the commit at which it was written. "main" moves on, as its makers mend a chat
    template, and no card could follow. Then the hub's own digest, by which the file is checked, speaks for
    it, as for all models whose card has none. Any other revision is meant to stay what it was, and of a file
    without a digest on the hub nobody can say that it arrived whole: who never trusts a file takes neither.

    Args:
        found: the file's sha256.
        hub_checks: the hub states a digest, and the file is checked by it.

    Raises:
        ModelFileError: it may not.
    """
    if found == source.sha256:
        return
    if source.revision == _MOVING and hub_checks:
        say(
            f"{source.label} has changed since its card was written: sha256 {found}, not {source.sha256}; "
            "it is checked by the digest that the hub states"
        )
        return
    raise ModelFileError(
        f"{source.label} has sha256 {found}",
        f"the card says {source.sha256}",
        "take another variant or model; if you trust this file, download it yourself and give its path",
    )
