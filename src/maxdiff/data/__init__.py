"""Examples from files to batches on devices: which, in what order, and as what arrays."""
