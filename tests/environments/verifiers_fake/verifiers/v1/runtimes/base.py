def cleanup_at_exit():
    pass
