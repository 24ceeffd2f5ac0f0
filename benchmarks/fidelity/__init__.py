"""Predicted training steps against measured ones."""
