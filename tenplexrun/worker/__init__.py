"""What a training script uses. The only place (with the warm pool's child) that imports torch."""
