"""What is fixed before a search begins: layouts that are given, ZeRO stages, and what each mesh axis is for."""
