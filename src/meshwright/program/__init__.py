"""The user's program: traced, its operators and their factors, its FLOPs and bytes. Knows nothing of hardware."""
