"""Who computes: one device, or ranks that each hold a share of the model; and the backends that the engine calls."""
