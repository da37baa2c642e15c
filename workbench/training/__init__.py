"""Training: one loop over the sharded model, its data made here, and export in the published layout."""
