"""What training needs: optimizers, gradients, metrics."""
