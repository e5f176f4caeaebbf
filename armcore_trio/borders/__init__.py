"""The only rooms' doors to PostgreSQL and NATS: nothing else imports psycopg, nats-py or trio-asyncio."""
