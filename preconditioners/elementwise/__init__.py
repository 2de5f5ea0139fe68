"""Stages that act entry by entry, by rows and columns or by the norm of a block, without matrix factors."""
