"""Contracts: the data of Retinue and the ports to everything outside it. No I/O, no vendor."""
