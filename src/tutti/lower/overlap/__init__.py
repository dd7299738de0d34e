"""Orders of Programs that hide communication behind computation."""
