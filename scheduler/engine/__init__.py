"""The engines that compute tokens: MLX and a fake one."""
