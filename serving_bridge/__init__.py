"""Verification records, log transports, serving engines and hot swap."""
