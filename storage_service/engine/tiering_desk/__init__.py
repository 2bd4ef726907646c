"""What tiering workers ask of the service: claims, epochs that fence, reports, lake pins."""
