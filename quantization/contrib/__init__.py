"""Formats that no shipped recipe and no paper of this repository uses, under the same laws as all others."""
