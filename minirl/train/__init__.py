"""The learner: one training step, its losses, advantages, batches and optimizer."""
