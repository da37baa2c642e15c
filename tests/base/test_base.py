from __future__ import annotations

import pickle

import pytest

from workbench.base import LoadError, Quantity, error_text, num_bytes


def test_error_text_names_where_found_expected_and_next_step() -> None:
    error = LoadError(
        "short read", where="a.safetensors", found="3 bytes", expected="8 bytes", next_step="Copy it again"
    )
    assert str(error) == "a.safetensors: short read (found 3 bytes, expected 8 bytes). Copy it again"


def test_error_survives_a_process_border_with_type_and_fields() -> None:
    error = pickle.loads(pickle.dumps(LoadError("short read", where="x", found=3)))
    assert type(error) is LoadError
    assert (error.where, error.found, str(error)) == ("x", "3", "x: short read (found 3)")


def test_an_error_without_a_message_reads_as_one() -> None:
    assert error_text(NotImplementedError()) == "NotImplementedError: (no message)"
    assert error_text(RuntimeError(" no kernel\n")) == "RuntimeError: no kernel"


def test_quantity_keeps_the_weaker_origin() -> None:
    weights = Quantity(100.0, "B", "exact")
    bandwidth = Quantity(50.0, "B/s", "datasheet", "sheet 7")
    step = weights / bandwidth
    assert (step.value, step.unit, step.basis, step.source) == (2.0, "s", "datasheet", "sheet 7")
    assert (step + Quantity(1.0, "s", "assumed", "guess")).basis == "assumed"


def test_quantity_refuses_to_mix_units() -> None:
    with pytest.raises(ValueError, match="cannot combine 's' with 'B'"):
        Quantity(1.0, "s") + Quantity(1.0, "B")


def test_num_bytes_counts_packed_types_and_refuses_half_bytes() -> None:
    assert num_bytes("BF16", (3, 5)) == 30
    assert num_bytes("F4", (3, 2)) == 3
    with pytest.raises(ValueError, match="not whole bytes"):
        num_bytes("F4", (3, 1))
