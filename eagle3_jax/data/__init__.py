"""Prompts, conversations, features, and packed training rows."""
