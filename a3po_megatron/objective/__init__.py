"""The mathematics of training, as functions of tensors. Imports torch and nothing else of ours."""
