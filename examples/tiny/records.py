"""The kinds of records that the corpus describes: their fields, and sentences that state them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import words
from words import Values

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
        {"event": _of(["concert", "workshop", "lecture", "festival", "market", "picnic", "exhibition", "race",
         "meetup"]),
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
        {"id": _int(100, 99999), "user": _name, "priority": _closed("low", "medium", "high"),
         "device": _of(words.OBJECTS)},
        (
            "Ticket {id}: {user} reports a broken {device}. Priority {priority}.",
            "{user} opened ticket {id} with {priority} priority because the {device} does not work.",
            "The {device} of {user} is broken (ticket {id}, {priority} priority).",
        ),
    ),
}  # fmt: skip
