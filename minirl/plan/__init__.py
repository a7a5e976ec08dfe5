"""What fits in the memory of a device, by estimate and by compilers."""
