"""Who holds what: `Layout` and the one table of sharding rules."""

from workbench.placement.choose import choose_layout
from workbench.placement.layout import Dispatch, Layout, RankCoords
from workbench.placement.table import (
    REPLICATED,
    Rule,
    Shard,
    check_layout,
    local_shape,
    owned_shards,
    place,
    rule_for,
    vision_is_sharded,
)
from workbench.placement.tiles import TileFit, tile_fit, tile_table, tile_unit

__all__ = [
    "REPLICATED",
    "Dispatch",
    "Layout",
    "RankCoords",
    "Rule",
    "Shard",
    "TileFit",
    "check_layout",
    "choose_layout",
    "local_shape",
    "owned_shards",
    "place",
    "rule_for",
    "tile_fit",
    "tile_table",
    "tile_unit",
    "vision_is_sharded",
]
