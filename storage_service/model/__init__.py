"""Values every part agrees on: tables, schemas, offsets, lake facts. No I/O, no clock."""
