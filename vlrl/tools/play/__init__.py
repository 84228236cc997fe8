"""Samples and episodes as a person sees and answers them."""
