"""What a plan is for: how long, how many, how fast."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from workbench.base import ConfigError

__all__ = ["Objective"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """`concurrency` sequences of up to `context` tokens at once, over the whole deployment.

    Prompts of `prompt` tokens (by default half of the context) enter in chunks of `chunk_tokens`. `max_first_token_s`
    bounds the time from a prompt's arrival at idle stages to its first token, `max_per_token_s` the time between two
    tokens of a sequence while all run at their full length; None sets no bound. `image_patches`: patches of the largest
    picture that must go through (by default the model's own limit; 0 for none). Among plans that keep the bounds the
    cheapest wins: devices x seconds per generated token. Raises ConfigError for counts below 1.
    """

    context: int = 8192
    concurrency: int = 16
    prompt: int | None = None
    chunk_tokens: int = 2048
    max_first_token_s: float | None = None
    max_per_token_s: float | None = None
    image_patches: int | None = None

    def __post_init__(self) -> None:
        for name in ("context", "concurrency", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}", expected="at least 1")
        if self.prompt is not None and not 1 <= self.prompt <= self.context:
            raise ConfigError(f"a prompt of {self.prompt} tokens", expected=f"1 to {self.context}, the context")
        for name in ("max_first_token_s", "max_per_token_s"):
            limit = getattr(self, name)
            if limit is not None and not limit > 0:
                raise ConfigError(f"{name}={limit}", expected="a time above 0")

    @property
    def prompt_tokens(self) -> int:
        return max(1, self.context // 2) if self.prompt is None else self.prompt

    @property
    def chunk(self) -> int:
        return min(self.chunk_tokens, self.prompt_tokens)

    @property
    def num_chunks(self) -> int:
        return -(-self.prompt_tokens // self.chunk)

    def to_json(self) -> dict[str, object]:
        return asdict(self)
