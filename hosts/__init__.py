"""Recipes in other people's training loops, one module a host; each imports its host, and public names of ours."""
