"""What a commit through our catalog may do to a service's own lake tables; adoption of one."""
