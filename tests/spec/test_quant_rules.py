"""K09: quantisation rules resolved module by module, against the tensor names that have the last word."""

from __future__ import annotations

import dataclasses

import pytest

from workbench.base import ConfigError
from workbench.checkpoint import F1, k3_config
from workbench.spec import ModelSpec, module_kind, parse_config, published_tensors, resolve_quant_rules
from workbench.spec.quant import RuleBook

LAYER = "language_model.model.layers.*."


@pytest.fixture
def spec() -> ModelSpec:
    return parse_config(k3_config(**F1))


def with_rules(spec: ModelSpec, *rules: str) -> ModelSpec:
    assert spec.quant is not None
    return dataclasses.replace(spec, quant=dataclasses.replace(spec.quant, ignore=rules))


def ruled_plain(spec: ModelSpec) -> set[str]:
    return {row.module for row in resolve_quant_rules(spec).rows if not row.is_quantised_by_rules}


def test_k09_published_rules_disagree_with_the_names_on_router_latents_and_mixing_rows(spec: ModelSpec) -> None:
    table = resolve_quant_rules(spec)
    assert {row.module for row in table.disagreements} == {
        f"{LAYER}block_sparse_moe.gate",
        f"{LAYER}block_sparse_moe.routed_expert_down_proj",
        f"{LAYER}block_sparse_moe.routed_expert_up_proj",
        f"{LAYER}self_attention_res_proj",
        f"{LAYER}mlp_res_proj",
        "language_model.model.output_attn_res_proj",
    }
    assert not any(row.is_quantised_in_files for row in table.disagreements)
    assert table.unused_rules == ()


def test_k09_every_matrix_stands_in_the_table_once(spec: ModelSpec) -> None:
    rows = resolve_quant_rules(spec).rows
    matrices = [
        t for t in published_tensors(spec) if len(t.shape) == 2 and t.part != "weight_scale" and t.role != "embedding"
    ]
    assert sum(row.count for row in rows) == len(matrices)
    packed = [row for row in rows if row.is_quantised_in_files]
    assert {(row.module, row.count) for row in packed} == {
        (f"{LAYER}block_sparse_moe.experts.*.{x}", 70) for x in ("w1", "w2", "w3")
    }
    assert all(row.agrees for row in packed)


@pytest.mark.parametrize(
    ("rule", "shared", "num_plain"),
    [
        (r"re:.*\.experts\..*", True, 210),
        (r"re:.*\.experts\.3\..*", False, 21),  # one expert of seven layers
        (r"re:.*layers\.[+-Z]\.block_sparse_moe\.experts", True, 210),  # a range that holds every digit
        (r"re:.*\.w1$", False, 70),
        ("Linear", True, 210),
    ],
)
def test_names_that_differ_in_digits_are_judged_once_where_no_rule_reads_them(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, rule: str, shared: bool, num_plain: int
) -> None:
    ruled = with_rules(spec, rule)
    assert RuleBook(ruled.quant).reads_no_numbers is shared
    table = resolve_quant_rules(ruled)
    experts = [row for row in table.rows if ".experts." in row.module]
    assert sum(row.count for row in experts if row.rule == rule) == num_plain
    assert {row.module.rpartition(".")[2] for row in experts} == {"w1", "w2", "w3"}
    monkeypatch.setattr(RuleBook, "reads_no_numbers", False)
    assert resolve_quant_rules(ruled) == table, "each name by itself comes to the same"


def test_k09_a_rule_meant_for_a_router_that_also_takes_a_projection_is_flagged(spec: ModelSpec) -> None:
    table = resolve_quant_rules(with_rules(spec, r"re:.*mlp\.gate"))
    (row,) = [row for row in table.rows if row.rule is not None]
    assert row.module == f"{LAYER}mlp.gate_proj"
    assert row.cuts_name
    anchored = resolve_quant_rules(with_rules(spec, r"re:.*mlp\.gate$"))
    assert anchored.unused_rules == (r"re:.*mlp\.gate$",)


def test_k09_patterns_are_anchored_at_the_start_of_the_full_nested_name(spec: ModelSpec) -> None:
    without_prefix = with_rules(spec, r"re:model\.layers\..*self_attn.*")
    assert resolve_quant_rules(without_prefix).unused_rules == (r"re:model\.layers\..*self_attn.*",)
    with_prefix = with_rules(spec, r"re:language_model\.model\.layers\..*self_attn.*")
    assert f"{LAYER}self_attn.q_proj" in ruled_plain(with_prefix)


def test_k09_a_plain_rule_matches_the_exact_name_only(spec: ModelSpec) -> None:
    gate = "language_model.model.layers.1.block_sparse_moe.gate"
    table = resolve_quant_rules(with_rules(spec, gate, "gate", "language_model.model.layers.1"))
    rows = {(row.module, row.rule): row.count for row in table.rows if row.module.endswith(".gate")}
    assert rows == {(f"{LAYER}block_sparse_moe.gate", gate): 1, (f"{LAYER}block_sparse_moe.gate", None): 6}
    assert table.unused_rules == ("gate", "language_model.model.layers.1")


def test_k09_packed_modules_that_a_rule_leaves_plain_are_a_disagreement(spec: ModelSpec) -> None:
    table = resolve_quant_rules(with_rules(spec, r"re:.*experts\.3\..*"))
    packed = [row for row in table.disagreements if row.is_quantised_in_files]
    assert {row.module for row in packed} == {f"{LAYER}block_sparse_moe.experts.*.{x}" for x in ("w1", "w2", "w3")}
    assert {row.count for row in packed} == {7}


def test_names_of_the_files_decide_not_those_of_the_spec(spec: ModelSpec) -> None:
    router = "language_model.model.layers.4.block_sparse_moe.gate"
    names = {tensor.name for tensor in published_tensors(spec)}
    names = names - {f"{router}.weight"} | {f"{router}.weight_packed", f"{router}.weight_scale"}
    rows = [row for row in resolve_quant_rules(spec, names).rows if row.module == module_kind(router)]
    assert {(row.is_quantised_in_files, row.count) for row in rows} == {(True, 1), (False, 6)}


def test_without_a_quantisation_block_everything_is_plain_and_agrees() -> None:
    table = resolve_quant_rules(parse_config(k3_config(**F1, is_quantised=False)))
    assert table.disagreements == ()
    assert not any(row.is_quantised_in_files for row in table.rows)


@pytest.mark.parametrize(
    "rule",
    [
        "re:(a+)+$",
        "re:(.*)*x",
        "re:.*.*.*.*x",
        "re:" + "a?" * 30 + "a" * 30,
        "re:(?x)a",
        "re:" + "a" * 300,
        "re:[",
        "re:*",
    ],
)
def test_rules_that_could_take_for_ever_or_are_no_pattern_are_refused(spec: ModelSpec, rule: str) -> None:
    with pytest.raises(ConfigError, match="ignore rule"):
        resolve_quant_rules(with_rules(spec, rule))


def test_a_thousand_exact_names_are_fine_and_a_thousand_patterns_are_not(spec: ModelSpec) -> None:
    exact = [f"language_model.model.layers.{i}.block_sparse_moe.gate" for i in range(1000)]
    assert f"{LAYER}block_sparse_moe.gate" in ruled_plain(with_rules(spec, *exact))
    with pytest.raises(ConfigError, match="1000 ignore patterns"):
        resolve_quant_rules(with_rules(spec, *(f"re:{name}" for name in exact)))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.layers.12.experts.7.w1", "a.layers.*.experts.*.w1"),
        ("mm_projector.proj.0", "mm_projector.proj.*"),
        ("blocks.3.fc0", "blocks.*.fc0"),
        ("layer2.x", "layer2.x"),
    ],
)
def test_module_kind_replaces_whole_numbers_only(name: str, kind: str) -> None:
    assert module_kind(name) == kind
