"""Extraction tasks: a sentence or two that describe a record, and the same record as compact JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import words
from turns import Turn
from words import Values, with_articles

Draw = Callable[[Values], Any]


def _int(low: int, high: int) -> Draw:
    return lambda v: v.number(low, high)


def _of(pool: list[str]) -> Draw:
    return lambda v: v.pick(pool)


def _closed(*choices: Any) -> Draw:
    return lambda v: v.any(choices)


def _list_of(pool: list[str]) -> Draw:
    return lambda v: v.some(pool, v.number(2, 4))


_name: Draw = lambda v: v.full_name() if v.coin(0.6) else v.name()  # noqa: E731
_city: Draw = Values.city
_date: Draw = Values.date
_time: Draw = Values.time
_price: Draw = Values.price
_code: Draw = Values.code
_company: Draw = Values.company
_title: Draw = lambda v: f"The {v.pick(words.ADJECTIVES).capitalize()} {v.pick(words.PLACES).capitalize()}"  # noqa: E731

# kind -> (fields in their usual order, sentences that mention every field)
KINDS: Mapping[str, tuple[Mapping[str, Draw], tuple[str, ...]]] = {
    "person": (
        {"name": _name, "age": _int(4, 97), "city": _city, "job": _of(words.JOBS)},
        (
            "{name} is {age} years old and works as a {job} in {city}.",
            "Meet {name}, a {job} from {city}, aged {age}.",
            "{name} lives in {city}. At {age}, {name} is still a {job}.",
            "The {job} from {city} is called {name} and is {age}.",
            "{name} is {age} years old and lives in {city}.",
            "{name} is a {job} in {city}.",
            "{name} is {age} years old.",
            "{name}, {age}, {job}.",
        ),
    ),
    "order": (
        {"order_id": _code, "item": _of(words.OBJECTS), "quantity": _int(1, 60), "price": _price},
        (
            "Order {order_id}: {quantity} x {item} at {price} each.",
            "We received order {order_id} for {quantity} pieces of {item}, {price} per piece.",
            "The customer bought {quantity} of our {item} for {price} each. The order number is {order_id}.",
            "Order {order_id} is for {quantity} x {item}.",
            "I want to buy {quantity} x {item}.",
        ),
    ),
    "book": (
        {"title": _title, "author": _name, "year": _int(1850, 2030), "pages": _int(40, 999)},
        (
            '"{title}" by {author} came out in {year} and has {pages} pages.',
            "{author} wrote {title} in {year}. It has {pages} pages.",
            "In {year}, {author} published {title}, a book of {pages} pages.",
            "{title} was written by {author} in {year}.",
        ),
    ),
    "event": (
        {"event": _of(["concert", "workshop", "lecture", "festival", "market", "picnic", "exhibition", "race", "meetup"]),
         "city": _city, "date": _date, "time": _time},
        (
            "The {event} takes place in {city} on {date} at {time}.",
            "Join us for a {event} on {date}. We start at {time} in {city}.",
            "There is a {event} in {city}: {date}, {time}.",
            "The {event} is in {city} on {date}.",
            "The {event} starts at {time}.",
        ),
    ),
    "flight": (
        {"flight": _code, "from": _city, "to": _city, "departure": _time},
        (
            "Flight {flight} from {from} to {to} leaves at {departure}.",
            "At {departure}, flight {flight} departs {from} for {to}.",
            "{from} to {to}, flight {flight}, departure {departure}.",
        ),
    ),
    "car": (
        {"color": _of(words.COLORS), "year": _int(1960, 2030), "price": _int(500, 90000), "owner": _name},
        (
            "{owner} sells a {color} car from {year} for {price} euros.",
            "For sale: {color} car, built in {year}, {price} euros, owner {owner}.",
            "The {color} car of {owner} was built in {year} and costs {price} euros.",
        ),
    ),
    "recipe": (
        {"dish": lambda v: f"{v.pick(words.FOODS)} {v.any(('soup', 'pie', 'salad', 'cake', 'stew'))}",
         "servings": _int(1, 12), "minutes": _int(5, 180), "ingredients": _list_of(words.FOODS)},
        (
            "The {dish} serves {servings} and takes {minutes} minutes. You need {ingredients}.",
            "For {servings} servings of {dish} take {ingredients}. It is ready in {minutes} minutes.",
            "{dish}: {minutes} minutes, {servings} servings, made with {ingredients}.",
        ),
    ),
    "invoice": (
        {"invoice": _code, "company": _company, "amount": _price, "due": _date},
        (
            "Invoice {invoice} from {company} over {amount} euros is due on {due}.",
            "Please pay {amount} euros to {company} by {due}. Invoice number: {invoice}.",
            "{company} sent invoice {invoice}. The amount is {amount} and it is due {due}.",
        ),
    ),
    "meeting": (
        {"topic": _of(words.GENERAL), "day": _closed(*words.DAYS), "time": _time, "room": _of(words.ROOMS)},
        (
            "The meeting about {topic} is on {day} at {time} in the {room}.",
            "On {day} at {time} we meet in the {room} to talk about {topic}.",
            "Meeting: {topic}. When: {day}, {time}. Where: {room}.",
        ),
    ),
    "package": (
        {"tracking": _code, "weight_kg": _price, "sender": _name, "destination": _city},
        (
            "Package {tracking} from {sender} weighs {weight_kg} kg and goes to {destination}.",
            "{sender} shipped a package of {weight_kg} kg to {destination} with number {tracking}.",
            "Destination {destination}, sender {sender}, weight {weight_kg} kg, tracking number {tracking}.",
        ),
    ),
    "product": (
        {"product": _of(words.OBJECTS), "color": _of(words.COLORS), "price": _price, "in_stock": _closed(True, False)},
        (
            "The {color} {product} costs {price} and is {in_stock}.",
            "Our {product} in {color} is {in_stock}. The price is {price}.",
            "{product}, {color}, {price}, {in_stock}.",
            "The {color} {product} costs {price}.",
            "The {product} is {in_stock}.",
        ),
    ),
    "contact": (
        {"name": _name, "email": lambda v: v.email(v.name()), "phone": lambda v: f"555-{v.number(1000, 9999)}"},
        (
            "You can reach {name} at {email} or {phone}.",
            "{name}, phone {phone}, email {email}.",
            "Write to {email} or call {phone} and ask for {name}.",
            "Call {name} at {phone}.",
            "The email of {name} is {email}.",
        ),
    ),
    "pet": (
        {"pet": _name, "animal": _of(words.ANIMALS), "age": _int(1, 25), "owner": _name},
        (
            "{owner} has a {animal} called {pet}, which is {age} years old.",
            "{pet} is a {animal} of {age} years that belongs to {owner}.",
            "The {animal} {pet} is {age} and lives with {owner}.",
            "{owner} has a {animal} called {pet}.",
        ),
    ),
    "course": (
        {"course": _of(words.HOBBIES), "teacher": _name, "students": _int(2, 60), "day": _closed(*words.DAYS)},
        (
            "{teacher} teaches {course} every {day} to {students} students.",
            "The {course} course on {day} has {students} students. The teacher is {teacher}.",
            "On {day}, {students} students learn {course} with {teacher}.",
        ),
    ),
    "employee": (
        {"name": _name, "company": _company, "role": _of(words.JOBS), "salary": _int(900, 9900)},
        (
            "{name} works at {company} as a {role} and earns {salary} a month.",
            "{company} hired {name} as {role} with a salary of {salary}.",
            "As a {role} at {company}, {name} makes {salary} per month.",
            "{name} works for {company} as a {role}.",
        ),
    ),
    "reading": (
        {"sensor": _code, "temperature": _int(-20, 45), "humidity": _int(5, 99), "room": _of(words.ROOMS)},
        (
            "Sensor {sensor} in the {room} shows {temperature} degrees and {humidity} percent humidity.",
            "In the {room}, sensor {sensor} measured {temperature} degrees at a humidity of {humidity} percent.",
            "{room}: {temperature} degrees, {humidity} percent humidity (sensor {sensor}).",
        ),
    ),
    "transfer": (
        {"sender": _name, "receiver": _name, "amount": _price, "date": _date},
        (
            "{sender} sent {amount} euros to {receiver} on {date}.",
            "On {date}, {receiver} got {amount} euros from {sender}.",
            "Transfer of {amount} euros, from {sender} to {receiver}, dated {date}.",
        ),
    ),
    "booking": (
        {"guest": _name, "city": _city, "nights": _int(1, 21), "arrival": _date},
        (
            "{guest} booked a hotel in {city} for {nights} nights from {arrival}.",
            "Hotel in {city}: guest {guest}, arrival {arrival}, {nights} nights.",
            "{guest} arrives in {city} on {arrival} and stays {nights} nights.",
            "{guest} stays {nights} nights in {city}.",
        ),
    ),
    "match": (
        {"home": _city, "away": _city, "home_goals": _int(0, 9), "away_goals": _int(0, 9)},
        (
            "{home} played {away} and the score was {home_goals} to {away_goals}.",
            "{home} against {away} ended {home_goals}:{away_goals}.",
            "The match between {home} and {away} finished {home_goals} to {away_goals}.",
        ),
    ),
    "song": (
        {"song": _title, "singer": _name, "seconds": _int(60, 600), "language": _of(words.LANGUAGES)},
        (
            "{singer} sings {song} in {language}. It lasts {seconds} seconds.",
            "{song} is a {language} song by {singer} of {seconds} seconds.",
            "The {language} song {song} by {singer} runs for {seconds} seconds.",
        ),
    ),
    "place": (
        {"place": _city, "country": _of(words.COUNTRIES), "population": _int(1000, 999999)},
        (
            "{place} is a city in {country} with {population} people.",
            "{population} people live in {place}, {country}.",
            "The city of {place} in {country} has a population of {population}.",
            "{place} lies in {country}.",
        ),
    ),
    "task": (
        {"task": lambda v: f"{v.any(('buy', 'clean', 'paint', 'fix', 'find'))} the {v.pick(words.OBJECTS)}",
         "assignee": _name, "due": _date, "done": _closed(True, False)},
        (
            "{assignee} has to {task} by {due}. The task is {done}.",
            "Task: {task}. Who: {assignee}. Until: {due}. Status: {done}.",
            "By {due}, {assignee} should {task}; it is {done}.",
        ),
    ),
    "trip": (
        {"traveler": _name, "cities": _list_of(words.CITIES), "days": _int(2, 30)},
        (
            "{traveler} visits {cities} in {days} days.",
            "The trip of {traveler} takes {days} days and goes through {cities}.",
        ),
    ),
    "ticket": (
        {"id": _int(100, 99999), "user": _name, "priority": _closed("low", "medium", "high"), "device": _of(words.OBJECTS)},
        (
            "Ticket {id}: {user} reports a broken {device}. Priority {priority}.",
            "{user} opened ticket {id} with {priority} priority because the {device} does not work.",
            "The {device} of {user} is broken (ticket {id}, {priority} priority).",
        ),
    ),
}  # fmt: skip

_FLAGS = {"in_stock": ("in stock", "sold out"), "done": ("done", "open")}

_AFTER = (
    "Extract {keys} as JSON.\n{text}",
    "Extract the {keys} from this text as JSON:\n{text}",
    "Read the text and answer with a JSON object with the keys {keys}.\nText: {text}",
    "JSON keys: {keys}\nText: {text}",
    "Extract a record with {keys} as JSON: {text}",
)
_BEFORE = (
    "{text}\nReturn the {keys} as JSON.",
    "{text}\n\nExtract {keys} as JSON.",
    "{text} Give me the {keys} as a JSON object.",
)
_WHOLE = (
    "Extract the {kind} as JSON.\n{text}",
    "Extract the {kind} record as JSON: {text}",
    "Turn this {kind} into JSON: {text}",
    "{text}\nWrite the {kind} as JSON.",
)
_SYSTEM = (
    "Extract {keys} from the text of the user. Answer with JSON only.",
    "You turn text into JSON with the keys {keys}.",
)
_NOISE = (
    "Hello!",
    "Thank you.",
    "Please note:",
    "Good news.",
    "It was a sunny day.",
    "See you soon.",
    "Best wishes.",
)


def compact(value: Any) -> str:
    """JSON with no white space, non-ASCII text as it is."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def listed(items: list[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def _spoken(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return _FLAGS[key][0 if value else 1]
    return listed(value) if isinstance(value, list) else str(value)


def _record(v: Values, kind: str) -> tuple[dict[str, Any], str]:
    fields, texts = KINDS[kind]
    text = v.any(texts)
    record = {key: draw(v) for key, draw in fields.items() if f"{{{key}}}" in text}
    text = with_articles(text.format_map({key: _spoken(key, value) for key, value in record.items()}))
    return record, text[0].upper() + text[1:] if v.coin(0.5) else text


def _thought(answer: Mapping[str, Any]) -> str:
    return "\n".join(
        f"{key}: {'missing' if value is None else _spoken(key, value)}" for key, value in answer.items()
    )


def extract(v: Values) -> Turn:
    """One record; some or all of its fields are asked for."""
    kind = v.any(list(KINDS))
    record, text = _record(v, kind)
    if v.coin(0.15):
        text = f"{v.any(_NOISE)} {text}"
    if v.coin(0.15):
        text = f"{text} {v.any(_NOISE)}"
    if v.coin(0.25):
        return Turn(v.any(_WHOLE).format(kind=kind, text=text), compact(record), _thought(record))
    keys = list(record)
    if v.coin(0.6):
        keys = keys[: v.number(1, len(keys))]
    if v.coin(0.4):
        v.rng.shuffle(keys)
    if keys == [kind]:  # "the invoice" would mean the number or the whole record
        keys = list(record)
    answer = {key: record[key] for key in keys}
    note = ""
    if v.coin(0.15):
        other = v.any([key for fields, _ in KINDS.values() for key in fields if key not in record])
        keys.insert(v.number(0, len(keys)), other)
        answer = {key: record.get(key) for key in keys}
        note = " Use null for what is missing."
    asked = listed(keys)
    style = v.number(0, 9)
    if style < 5:
        user = v.any(_AFTER).format(keys=asked, text=text + note)
    elif style < 8:
        user = v.any(_BEFORE).format(keys=asked, text=text) + note
    else:
        return Turn(text, compact(answer), _thought(answer), system=v.any(_SYSTEM).format(keys=asked) + note)
    return Turn(user, compact(answer), _thought(answer))


def extract_many(v: Values) -> Turn:
    """Two to four records of one kind as an array."""
    kind = v.any(("person", "pet", "product", "place", "order", "employee"))
    records = [_record(v, kind) for _ in range(v.number(2, 4))]
    keys = [key for key in KINDS[kind][0] if all(key in record for record, _ in records)][: v.number(2, 3)]
    answer = [{key: record[key] for key in keys} for record, _ in records]
    text = " ".join(text for _, text in records)
    user = v.any((
        "Extract a JSON array with {keys} of every {kind}.\n{text}",
        "{text}\nList {keys} of every {kind} as a JSON array.",
    )).format(keys=listed(keys), kind=kind, text=text)  # fmt: skip
    thought = "\n".join(
        f"{i}. {', '.join(_spoken(k, x) for k, x in a.items())}" for i, a in enumerate(answer, 1)
    )
    return Turn(user, compact(answer), thought)
