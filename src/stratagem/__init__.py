"""Stratagem: how should this PyTorch model be trained on that GPU cluster?"""
