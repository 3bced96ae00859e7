"""Fitting a mapper: one pass over both models for the moments, then solves without models or data."""
