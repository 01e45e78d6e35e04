"""Memory and time of one training step, computed from sizes alone: no weights are loaded."""
