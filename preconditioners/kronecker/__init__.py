"""Stages with one matrix per axis, computed from a statistic: Shampoo, the eigenbasis of SOAP, eigenfactors."""
