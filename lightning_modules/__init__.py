"""Thin LightningModules, one per training objective, and their callbacks."""
