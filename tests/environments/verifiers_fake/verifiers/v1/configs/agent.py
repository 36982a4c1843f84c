def agent_config_fields(config):
    return config.seats
