"""What a step takes: bytes and seconds of every layer and rank."""
