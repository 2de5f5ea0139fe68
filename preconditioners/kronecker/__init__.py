"""Stages with one matrix for each axis, computed from a statistic: Shampoo, the eigenbasis of SOAP, eigenfactors."""
