"""Nodes that work one stage after another: the baseline that overlapping is measured against.

They are the shipped nodes but for one thing: the sender encodes a whole cache into memory before it
sends the first byte, and the receiver takes the last byte before it verifies and decodes the first.
"""
