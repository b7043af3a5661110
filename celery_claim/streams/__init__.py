"""Redis Streams as a message queue: message -> stream -> consumer group -> ack (recover by claim).

append -> (delay) -> read -> lease -> settle, or release. Every module takes a redis client that its caller made.
"""
