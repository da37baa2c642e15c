"""Reading a config file key by key, so that what was not read can be shown."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import NoReturn

from workbench.base import ConfigError, UnsupportedModelError, read_small_file, short_repr
from workbench.spec.model import ModelSpec

__all__ = ["SERIALISED_DEFAULTS", "ConfigReader", "read_json", "watched_readers"]

_MISSING = object()
MAX_CONFIG_BYTES = 16 << 20  # a config is kilobytes; a hostile one must not fill memory


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from a file. Raises ConfigError where it is absent, too large, malformed or not an object."""
    try:
        value = json.loads(read_small_file(path, max_bytes=MAX_CONFIG_BYTES), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not readable as JSON: {error}", where=path) from None
    if not isinstance(value, dict):
        raise ConfigError("not a JSON object", where=path, found=type(value).__name__)
    return value


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate keys {sorted({n for n in names if names.count(n) > 1})}")
    return value


# transformers writes its own defaults into every config; they carry no news about the model.
SERIALISED_DEFAULTS = frozenset(
    """
    _name_or_path add_cross_attention architectures auto_map bad_words_ids begin_suppress_tokens
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label initializer_range is_decoder is_encoder_decoder label2id
    length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states output_scores prefix problem_type pruned_heads remove_invalid_values
    repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens task_specific_params
    temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torchscript transformers_version
    typical_p use_bfloat16 use_cache _attn_implementation ignore_index image_placeholder
    """.split()  # noqa: SIM905 - a list of forty literals reads worse
)


_watched: ContextVar[list[ConfigReader] | None] = ContextVar("watched", default=None)


@contextmanager
def watched_readers() -> Iterator[list[ConfigReader]]:
    """Collects every reader made inside, so that what a failed parse had read can still be told."""
    readers: list[ConfigReader] = []
    token = _watched.set(readers)
    try:
        yield readers
    finally:
        _watched.reset(token)


class ConfigReader:
    """A mapping that remembers which keys were asked for; `finish` returns the rest as the spec's unknown keys."""

    def __init__(self, values: Mapping[str, object], *, where: str = "config.json", ignore: Collection[str] = ()):
        self._values = values
        self._where = where
        self._ignore = frozenset(ignore)
        self._read: set[str] = set()
        self._children: list[ConfigReader] = []
        if (readers := _watched.get()) is not None:
            readers.append(self)

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def holds_list(self, key: str) -> bool:
        return isinstance(self._values.get(key), list)

    def names(self) -> tuple[str, ...]:
        return tuple(self._values)

    def skip(self, *keys: str) -> None:
        """Keys known to carry nothing we need."""
        self._read.update(keys)

    def child(self, key: str) -> ConfigReader:
        value = self._take(key, _MISSING)
        if not isinstance(value, Mapping):
            self._mistyped(key, value, "an object")
        reader = ConfigReader(value, where=f"{self._where}: {key}", ignore=self._ignore)
        reader._prefix = f"{self._prefix}{key}."
        self._children.append(reader)
        return reader

    _prefix = ""

    def integer(self, key: str, *, default: object = _MISSING, minimum: int = 1, maximum: int = 1 << 40) -> int:
        value = self._take(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self._mistyped(key, value, "an integer")
        # Bounded above as well: a size of 10**30 would only fail much later, inside arithmetic or an allocation.
        if not (minimum <= value or value == default) or value > maximum:
            self._mistyped(key, value, f"an integer from {minimum} to {maximum}")
        return value

    def number(self, key: str, *, default: object = _MISSING) -> float:
        value = self._take(key, default)
        if not _is_finite(value):
            self._mistyped(key, value, "a finite number")
        return float(value)  # type: ignore[arg-type]

    def boolean(self, key: str, *, default: object = _MISSING) -> bool:
        value = self._take(key, default)
        if not isinstance(value, bool):
            self._mistyped(key, value, "true or false")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """A switch that some files write as a number: anything but 0 is on."""
        value = self._take(key, default)
        if not isinstance(value, int):
            self._mistyped(key, value, "true, false or an integer")
        return bool(value)

    def string(self, key: str, *, default: object = _MISSING) -> str:
        value = self._take(key, default)
        if not isinstance(value, str):
            self._mistyped(key, value, "a string")
        return value

    def int_list(self, key: str, *, default: object = _MISSING) -> tuple[int, ...]:
        value = self._take(key, default)
        if value is default and isinstance(value, tuple):
            return value
        if not isinstance(value, list) or not all(isinstance(x, int) and not isinstance(x, bool) for x in value):
            self._mistyped(key, value, "a list of integers")
        return tuple(value)

    def str_list(self, key: str, *, default: object = _MISSING) -> tuple[str, ...]:
        value = self._take(key, default)
        if value is default and isinstance(value, tuple):
            return value
        if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
            self._mistyped(key, value, "a list of strings")
        return tuple(value)

    def float_triple(self, key: str) -> tuple[float, float, float]:
        value = self._take(key, _MISSING)
        if not isinstance(value, list) or len(value) != 3 or not all(map(_is_finite, value)):
            self._mistyped(key, value, "a list of three finite numbers")
        return (float(value[0]), float(value[1]), float(value[2]))

    def one_of(self, key: str, wanted: Collection[str], *, default: object = _MISSING) -> str:
        """A string out of a list; raises UnsupportedModelError for another one."""
        value = self.string(key, default=default)
        if value not in wanted:
            raise UnsupportedModelError(
                f"{key} has a setting that this version does not know",
                where=self._where,
                found=short_repr(value),
                expected=" or ".join(wanted),
            )
        return value

    def require(self, key: str, wanted: object, *, default: object = _MISSING) -> None:
        """Read a switch of which only one setting is computed here; raises UnsupportedModelError otherwise."""
        value = self._take(key, default)
        if value != wanted or isinstance(value, bool) != isinstance(wanted, bool):
            raise UnsupportedModelError(
                f"{key} has a setting that this version does not compute",
                where=self._where,
                found=short_repr(value),
                expected=repr(wanted),
            )

    def refuse(self, key: str, why: str) -> NoReturn:
        raise UnsupportedModelError(f"{key}: {why}", where=self._where, found=short_repr(self._values.get(key)))

    def read_keys(self) -> list[str]:
        """Keys of this object (not of those inside it) that were asked for and are there, with their path."""
        return [self._prefix + key for key in self._values if key in self._read]

    def unread(self) -> list[tuple[str, object]]:
        own = [
            (self._prefix + key, value)
            for key, value in self._values.items()
            if key not in self._read and key not in self._ignore
        ]
        return own + [pair for child in self._children for pair in child.unread()]

    def finish(self, spec: ModelSpec) -> ModelSpec:
        return dataclasses.replace(spec, unknown_keys=tuple(self.unread()))

    def _take(self, key: str, default: object) -> object:
        self._read.add(key)
        if key in self._values:
            return self._values[key]
        if default is _MISSING:
            raise ConfigError(f"key {key!r} is missing", where=self._where)
        return default

    def _mistyped(self, key: str, value: object, wanted: str) -> NoReturn:
        raise ConfigError(f"{key} has a wrong value", where=self._where, found=short_repr(value), expected=wanted)


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30
